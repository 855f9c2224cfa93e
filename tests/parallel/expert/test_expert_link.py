"""Rows on a link that a test holds in its hands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from omnitrain.ops.experts import grouped_mm as grouped
from omnitrain.ops.experts.install import set_experts, use_omnitrain_experts
from omnitrain.ops.experts.timing import NOT_RECORDED, LayerSpans
from omnitrain.ops.timing import SpanRecorder
from omnitrain.parallel.expert.apply import SharedExpertOverlap, shared_experts
from omnitrain.parallel.expert.dispatch import RankDispatcher
from tests.parallel import factories
from tests.parallel.laid_out import counted
from tests.peaks import peak_bytes

CPU = torch.device("cpu")


class SlowLoopback:
    """One rank that sends to itself: rows arrive when they are awaited, and not a moment before."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], None]:
        number = sum(event.startswith("start") for event in self.events)
        self.events.append(f"start {number}")
        out.fill_(torch.nan)

        def wait() -> None:
            self.events.append(f"wait {number}")
            out.copy_(rows)
            rows.fill_(torch.nan)  # what was sent belongs to nobody any more

        return wait

    def exchange_counts(self, counts: Tensor) -> Tensor:
        return counts


def experts_layer(factory: str) -> nn.Module:
    return getattr(factories, factory)().model.layers[1].mlp


def trained(layer: nn.Module, hidden: Tensor) -> list[Tensor]:
    """Output and gradients."""
    layer.zero_grad()
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_rows_are_read_behind_the_wait_and_what_was_sent_is_read_no_more(chunks: int) -> None:
    layer = experts_layer("moe_of_32_experts")
    use_omnitrain_experts(layer)
    hidden = torch.randn(1, 40, layer.experts.hidden_dim)
    expected = trained(layer, hidden)
    set_experts(layer.experts, dispatcher=RankDispatcher(SlowLoopback(), chunks), delays_weight_gradients=True)
    for one, other in zip(trained(layer, hidden), expected, strict=True):
        assert torch.equal(one, other)


def test_everything_is_on_its_way_before_anything_is_awaited_and_weights_are_computed_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, link = experts_layer("moe_of_32_experts"), SlowLoopback()
    use_omnitrain_experts(layer)
    product = grouped.F.grouped_mm

    def noted(left: Tensor, right: Tensor, **given: Any) -> Tensor:
        link.events.append("rows" if right.dim() == 3 else "weights")
        return product(left, right, **given)

    monkeypatch.setattr(grouped.F, "grouped_mm", noted)
    set_experts(layer.experts, dispatcher=RankDispatcher(link, 2), delays_weight_gradients=True)
    set_experts(layer.experts, overlap_with=lambda spans: link.events.append("shared"))
    output = layer(torch.randn(1, 40, layer.experts.hidden_dim).requires_grad_())
    both = ["rows", "rows"]
    there, back = ["start 0", "start 1"], ["wait 2", "wait 3"]
    under_way = [*there, "wait 0", *both, "start 2", "wait 1", *both, "start 3"]
    assert link.events == [*under_way, "shared", *back]
    link.events.clear()
    output.sum().backward()
    assert link.events == [*under_way, *2 * 16 * ["weights"], *back]  # of two matrices in sixteen pieces


def test_every_product_exchange_and_wait_is_recorded_once_and_recording_changes_no_bit() -> None:
    layer, recorder = experts_layer("moe_of_32_experts"), SpanRecorder()
    use_omnitrain_experts(layer)
    hidden = torch.randn(1, 40, layer.experts.hidden_dim)
    set_experts(layer.experts, dispatcher=RankDispatcher(SlowLoopback(), 2), delays_weight_gradients=True)
    expected = trained(layer, hidden)
    set_experts(layer.experts, spans=LayerSpans(recorder, "layer"))
    recorder.begin()
    found = trained(layer, hidden)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    seen = Counter((s.what.kind, s.what.name, s.what.phase, s.what.chunk) for s in recorder.end().spans)
    both = [("compute", "experts"), *((kind, way) for kind in ("link", "wait") for way in ("dispatch", "combine"))]
    of_chunks = {(*what, phase, chunk) for what in both for phase in ("forward", "backward") for chunk in (0, 1)}
    of_all = {("wait", "counts", "forward", None), ("compute", "weight gradients", "backward", None)}
    assert seen == Counter(of_chunks | of_all)


def test_shared_experts_that_fill_a_wait_are_in_the_trace_and_recording_changes_no_bit() -> None:
    layer, recorder = experts_layer("glm4_moe"), SpanRecorder()
    use_omnitrain_experts(layer)
    hidden = torch.randn(1, 40, layer.experts.hidden_dim)
    early = SharedExpertOverlap(layer, layer.shared_experts)
    dispatcher = RankDispatcher(SlowLoopback(), 2)
    set_experts(layer.experts, dispatcher=dispatcher, delays_weight_gradients=True, overlap_with=early.compute)
    expected = trained(layer, hidden)
    set_experts(layer.experts, spans=LayerSpans(recorder, "layer"))
    recorder.begin()
    found = trained(layer, hidden)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    spans = {(s.what.kind, s.what.name, s.what.phase, s.what.chunk): s for s in recorder.end().spans}
    forward, backward = (spans["compute", "shared experts", phase, None] for phase in ("forward", "backward"))
    assert spans["link", "combine", "forward", 1].start < forward.start
    assert forward.start + forward.seconds <= spans["wait", "combine", "forward", 0].start
    assert spans["link", "combine", "backward", 0].start < backward.start
    assert backward.start + backward.seconds <= spans["wait", "combine", "backward", 1].start


@pytest.mark.parametrize(
    "chunks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.second)]
)
def test_peak_memory_with_overlap_is_within_a_tenth_of_without_where_weights_are_large_and_rows_few(
    chunks: int,
) -> None:
    config = Qwen3MoeConfig(num_experts=32, num_experts_per_tok=2, hidden_size=128, moe_intermediate_size=256)
    layer, hidden = Qwen3MoeSparseMoeBlock(config), torch.randn(1, 64, 128)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    use_omnitrain_experts(layer)
    peaks = []
    for number, delays in ((1, False), (chunks, False), (chunks, True)):
        dispatcher = RankDispatcher(SlowLoopback(), number)
        set_experts(layer.experts, dispatcher=dispatcher, delays_weight_gradients=delays)
        layer.zero_grad()
        peaks.append(peak_bytes(lambda: layer(hidden).sum().backward()))
    plain, *overlapped = peaks
    assert plain > sum(parameter.nbytes for parameter in layer.experts.parameters())  # their gradients
    assert max(overlapped) <= 1.1 * plain


def test_weights_are_not_left_for_later_where_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, link = experts_layer("moe_of_32_experts"), SlowLoopback()
    use_omnitrain_experts(layer)
    product, dispatcher = grouped.F.grouped_mm, RankDispatcher(link, 2)

    def noted(left: Tensor, right: Tensor, **given: Any) -> Tensor:
        link.events.append("rows" if right.dim() == 3 else "weights")
        return product(left, right, **given)

    monkeypatch.setattr(grouped.F, "grouped_mm", noted)
    set_experts(layer.experts, dispatcher=dispatcher, delays_weight_gradients=True, row_budget=8)
    output = layer(torch.randn(1, 40, layer.experts.hidden_dim).requires_grad_())
    link.events.clear()
    output.sum().backward()
    last_start = max(place for place, event in enumerate(link.events) if event.startswith("start"))
    assert link.events[last_start + 1 :] == ["wait 2", "wait 3"] and link.events.count("weights") >= 80 * 2 / 8


def test_a_backward_for_rows_alone_leaves_nothing_to_the_next_one() -> None:
    layer = experts_layer("moe_of_32_experts")
    use_omnitrain_experts(layer)
    hidden = torch.randn(1, 40, layer.experts.hidden_dim)
    expected = trained(layer, hidden)
    set_experts(layer.experts, dispatcher=RankDispatcher(SlowLoopback(), 4), delays_weight_gradients=True)
    layer.zero_grad()
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    loss = output.square().sum()
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward()
    for one, other in zip([output, hidden.grad, *(p.grad for p in layer.parameters())], expected, strict=True):
        assert torch.equal(one, other)


def test_only_the_first_plan_brings_numbers_of_the_host_to_the_device() -> None:
    num_experts = 11  # of no other test: how experts are ordered is remembered by the process
    dispatcher, index = RankDispatcher(SlowLoopback(), 3), torch.randint(num_experts, (40, 2))
    found = []
    for _ in range(2):
        with counted() as ops:
            dispatcher.plan(index, num_experts, NOT_RECORDED)
        found.append(ops["aten.lift_fresh"])
    assert found[0] > 0 and found[1] == 0


def test_to_look_for_shared_experts_draws_nothing_at_random() -> None:
    layer = experts_layer("glm4_moe").train()
    layer.gate.register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    before = torch.get_rng_state()
    assert shared_experts(layer, layer.experts, CPU) is layer.shared_experts
    assert torch.equal(torch.get_rng_state(), before)


def test_shared_experts_are_found_where_they_are_called_behind_the_others() -> None:
    found = {}
    for name in ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_moe"):
        layer = experts_layer(name)
        found[name] = shared_experts(layer, layer.experts, CPU)
        assert "forward" not in vars(layer.experts)
        if found[name] is not None:
            assert found[name] is layer.shared_experts
    assert [name for name, shared in found.items() if shared is not None] == ["glm4_moe", "deepseek_v3"]


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_shared_experts_are_found_before_the_weights_are_there(name: str) -> None:
    """As where rank 0 hands them out: buffers, such as a router's bias, are there already."""
    layer = experts_layer(name)
    for module in layer.modules():
        for key, weight in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(weight.to("meta")))
    assert {value.device for value in layer.buffers()} == {CPU}
    assert shared_experts(layer, layer.experts, CPU) is layer.shared_experts
    assert all(weight.is_meta for weight in layer.parameters())
