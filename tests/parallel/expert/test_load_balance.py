"""Balance losses, biases and load metrics of routers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.discovery import discover
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.expert.load_balance import RouterMonitor, counts_per_sample, micro_batch_balance, sample_balance
from omnitrain.parallel.expert.routing_record import RoutingFiles, RoutingOfRun
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.recipe import ExpertsBalance, parse_layout
from tests.parallel import factories
from tests.parallel.expert.test_experts import text_samples
from tests.parallel.laid_out import counted, full, laid_out

ROUTER = "foundation.model.layers.1.mlp.gate.weight"
BALANCE = ExpertsBalance(loss="sample", weight=5.0, z_weight=0.5, bias_rate=0.01)


def scores_and_index(tokens: int = 24, experts: int = 8) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(tokens, experts, generator=generator) for _ in range(3)]
    return scores, [layer.topk(2)[1] for layer in scores]


def test_the_micro_batch_form_is_that_of_transformers() -> None:
    scores, index = scores_and_index()
    expected = load_balancing_loss_func(tuple(scores), 8, 2)
    torch.testing.assert_close(micro_batch_balance(scores, index), expected)


def test_the_loss_of_samples_adds_up_over_any_cut_and_is_one_where_experts_are_equal() -> None:
    scores, index = (layers[0] for layers in scores_and_index())
    sample = torch.tensor([0] * 10 + [1] * 14)
    counts = counts_per_sample(index, sample, 2, 8)
    whole = sample_balance(scores, counts, sample)
    parts = [sample_balance(scores[rows], counts, sample[rows]) for rows in (slice(0, 7), slice(7, 24))]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    equal = sample_balance(torch.zeros(8, 8), torch.full((1, 8), 2.0), torch.zeros(8, dtype=torch.long))
    assert float(equal) / 8 == pytest.approx(1.0)


def balanced(layout: str, balance: ExpertsBalance = BALANCE, steps: int = 2) -> dict[str, Any]:
    """Losses, gradients, biases and load after some steps of SGD."""
    torch.manual_seed(0)
    found = parse_layout(layout)
    model = build_omni_model(foundation=factories.deepseek_v3()).train()
    batch = to_samples(discover(factories.deepseek_v3()), text_samples())
    state = init_state_of(found.plan())
    table = micro_batches(model, batch, state.dp_size, found.accumulation)
    build_parallelize_model(model, parallel_plan=found.plan(), enable_mixed_precision=False)
    routers = RouterMonitor(model, balance)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    planned = step_planner(model)(table[state.dp_rank])
    losses, gradients = [], []
    for _ in range(steps):
        loss = accumulate_gradients(model, planned, routers=routers)
        torch.distributed.all_reduce(loss, group=state.loss_group)
        losses.append(loss.item())
        gradients.append(full(dict(model.named_parameters())[ROUTER].grad).clone())
        optimizer.step()
        optimizer.zero_grad()
        routers.end()
    bias = model.get_submodule(ROUTER.rpartition(".")[0]).e_score_correction_bias
    return {"losses": losses, "gradients": gradients, "bias": bias.clone(), "load": routers.read()}


@pytest.mark.parametrize(
    ("loss", "layouts"),
    [("sample", ["dp1.accum3.recompute", "dp2.sp2.ep2.accum2"]), ("previous_step", ["dp2.ep2.recompute"])],
)
def test_balance_is_the_same_on_any_layout_and_a_recompute_counts_nothing(
    ranks: RankPool, loss: str, layouts: list[str]
) -> None:
    balance = BALANCE.model_copy(update={"loss": loss})
    expected = ranks.run(balanced, "dp1", balance, timeout_s=60, world=1)[0]
    for layout in layouts:
        world = parse_layout(layout).num_ranks
        found = ranks.run(balanced, layout, balance, timeout_s=60, world=world)[0]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), layout
        for one, other in zip(found["gradients"], expected["gradients"], strict=True):
            assert float((one - other).abs().max() / other.abs().max()) < 1e-5, layout
        assert torch.equal(found["bias"], expected["bias"]) and float(found["bias"].abs().max()) > 0.005
        for name, load in found["load"].items():
            assert load["load"] == expected["load"][name]["load"] > 1
            assert load["entropy"] == pytest.approx(expected["load"][name]["entropy"]) and 0 < load["entropy"] < 1
            assert (load["bytes"] > 0) == (".ep" in layout)


def sums(loss: str) -> int:
    """All-reduces of a micro-batch whose row two ranks share."""
    model = laid_out(state={"ulysses_size": 2}, model=build_omni_model(foundation=factories.qwen3_moe()).train())
    routers = RouterMonitor(model, ExpertsBalance(loss=loss))
    planned = step_planner(model)([Pack.from_samples(to_samples(discover(factories.qwen3_moe()), text_samples(2)))])
    with counted() as calls:
        accumulate_gradients(model, planned, routers=routers)
    return calls["c10d.allreduce_"]


def test_choices_of_all_layers_are_added_up_over_a_shared_row_at_once(ranks: RankPool) -> None:
    samples, shares = (ranks.run(sums, loss, timeout_s=60, world=2)[0] for loss in ("sample", "previous_step"))
    assert samples == shares + 1


def moved_parameter() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, load and bias after a step, where the bias is a parameter that FSDP shards."""
    foundation = factories.qwen3_moe().train()
    for layer in foundation.model.layers:
        layer.mlp.gate.choice_bias = torch.nn.Parameter(torch.zeros(1, 4), requires_grad=False)
    model = laid_out(model=build_omni_model(foundation=foundation).train())
    routers = RouterMonitor(model, ExpertsBalance(bias_rate=0.01))
    routed(True, routers, model)
    routers.end()
    biases = [full(layer.mlp.gate.choice_bias) for layer in model.foundation.model.layers]
    return list(zip(routers._load.values(), biases, strict=True))


def test_a_bias_that_is_a_sharded_parameter_moves_against_the_load(ranks: RankPool) -> None:
    for load, bias in ranks.run(moved_parameter, timeout_s=60, world=1)[0]:
        torch.testing.assert_close(bias, 0.01 * (load.mean() - load).sign()[None])
        assert float(bias.abs().sum()) > 0


def test_without_balance_the_loss_is_that_of_the_tokens(ranks: RankPool) -> None:
    none = ranks.run(balanced, "dp1", ExpertsBalance(), 1, timeout_s=60, world=1)[0]
    some = ranks.run(balanced, "dp1", BALANCE, 1, timeout_s=60, world=1)[0]
    assert some["losses"][0] > none["losses"][0] + 1 and float(none["bias"].abs().max()) == 0


def test_the_micro_batch_form_is_a_mean_over_the_parts_of_a_row(ranks: RankPool) -> None:
    asked = ExpertsBalance(loss="micro_batch", weight=100.0)
    none = ranks.run(balanced, "dp1", ExpertsBalance(), 1, timeout_s=60, world=1)[0]["losses"][0]
    for layout in ("dp1", "dp1.sp2"):  # of each part it is 2 or little more, as in transformers: two experts per token
        found = ranks.run(balanced, layout, asked, 1, timeout_s=60, world=parse_layout(layout).num_ranks)[0]
        assert 1.9 < (found["losses"][0] - none) / asked.weight < 3, layout


def routed(labels: bool, routers: RouterMonitor, model: ot.OmniModel) -> None:
    """The forward and backward of a step, on one process."""
    given = text_samples(2)
    if not labels:
        given = [sample | {"labels": torch.full_like(sample["labels"], -100)} for sample in given]
    samples = to_samples(discover(factories.qwen3_moe()), given)
    accumulate_gradients(model, step_planner(model)([Pack.from_samples(samples)]), routers=routers)


def test_a_step_without_an_update_leaves_nothing_to_the_next_one() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe()).train()
    routers = RouterMonitor(model, ExpertsBalance(loss="sample", weight=0.01))
    counts = []
    for before in (0, 1):
        for labels in [False] * before + [True]:
            routed(labels, routers, model)
        routers.end()
        counts.append({name: load.sum().item() for name, load in routers._load.items()})
    tokens = sum(sample["input_ids"].numel() for sample in text_samples(2))
    assert counts[0] == counts[1] and set(counts[0].values()) == {2.0 * tokens}


def test_samples_that_data_call_idle_are_balanced_and_recorded_as_any_other(tmp_path: Path) -> None:
    given = to_samples(discover(factories.qwen3_moe()), text_samples(2))
    losses = []
    for name in ("idle", "other"):
        model = build_omni_model(foundation=factories.qwen3_moe()).train()
        routing = RoutingOfRun(model, str(tmp_path / name), None, rank=0)
        pack = Pack.from_samples([replace(given[0], id=name, source=name), given[1]])
        routers, batch = RouterMonitor(model, ExpertsBalance(loss="sample", weight=1.0)), step_planner(model)([pack])
        losses.append(
            accumulate_gradients(model, batch, routers=routers, forward_context=routing.forward_context).item()
        )
        routing.end(1)
        decisions = RoutingFiles(tmp_path / name).of_samples([name], [len(given[0])]).decisions
        assert {sample for _, _, sample in decisions} == {name}
    assert losses[0] == losses[1]


def test_experts_that_do_not_get_every_token_of_a_row_are_not_counted_and_refuse_a_loss() -> None:
    model = build_omni_model(foundation=factories.qwen3_moe()).train()
    mlp = model.foundation.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: torch.cat([plain(hidden[:, :5]), plain(hidden[:, 5:])], 1)  # such as two modalities
    routers = RouterMonitor(model, ExpertsBalance())
    routed(True, routers, model)
    routers.end()
    first, second = routers._load.values()
    assert float(first.sum()) == 0 < float(second.sum())
    with pytest.raises(UserError, match=r"layers.0.mlp.experts did not get every token of a pack, .* use loss: none"):
        routed(True, RouterMonitor(model, ExpertsBalance(loss="sample", weight=0.01)), model)


@pytest.mark.parametrize(
    ("factory", "balance", "message"),
    [
        (factories.qwen3_moe, {"bias_rate": 0.01}, r"bias_rate: found 0.01, but the router of .* has no bias"),
        (factories.any_to_any, {"loss": "sample"}, r"train.experts: \w+ has no experts to balance; remove it"),
    ],
)
def test_a_balance_that_the_model_has_no_means_for_is_refused(factory: Any, balance: dict, message: str) -> None:
    model = factory()
    omni = model if isinstance(model, ot.OmniModel) else build_omni_model(foundation=model)
    with pytest.raises(UserError, match=message):
        RouterMonitor(omni, ExpertsBalance(**balance))
