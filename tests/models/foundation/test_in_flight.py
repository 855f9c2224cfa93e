"""Two micro-batches in flight in one model: any order of forwards and backwards gives the same bits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.delayed_wgrad import WeightGradients, delaying
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.ops.patch_forward import wrapped_forward
from omnitrain.parallel.memory.offload import around_calls
from omnitrain.parallel.memory.recompute import recompute_blocks
from tests.families import FAMILIES
from tests.models.plain import pair_of
from tests.models.staged import gradients, unequal, whole_step

# Family -> a module in the middle of a block. They have modules that some samples skip; experts; linear attention that
# runs sample by sample; and windows.
CASES = {
    "ernie4_5_vl_moe": "mlp.text_moe",
    "qwen3_moe": "mlp.experts",
    "qwen3_next": "linear_attn.norm",
    "gemma3": "self_attn.o_proj",
}
ORDERS = ("F0 F1 B1 B0", "F0 F1 B0 B1", "B0 in F1")


@lru_cache(maxsize=4)
def model_and_packs(family: str) -> tuple[OmniModel, list[Pack]]:
    torch.manual_seed(0)
    both = pair_of(FAMILIES[family]())
    assert both.ours.runner.contract.packs  # measured here, so that no call is counted below
    samples = [probe.sample for probe in both.probes]  # texts first
    return both.ours, [Pack.from_samples(samples[2:]), Pack.from_samples(samples[:2])]


def blocks(model: OmniModel) -> list[nn.Module]:
    return [module for module in model.foundation.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute(model: OmniModel, on: bool) -> None:
    recompute_blocks(blocks(model))
    for block in blocks(model):
        block.gradient_checkpointing = on


def step(family: str, order: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of two packs in an order of their forwards and backwards."""
    model, packs = model_and_packs(family)
    model.zero_grad(set_to_none=True)
    count = sum(sum(pack.loss_counts().values()) for pack in packs)
    losses: dict[str, Tensor] = {}

    def forward(index: str) -> None:
        losses[index] = model(packs[int(index)]).losses["text"].sum / count

    if order == "B0 in F1":
        forward("0")
        with meanwhile(module_at(model, CASES[family]), losses["0"].backward):
            forward("1")
        losses["1"].backward()
    else:
        for action in order.split():
            forward(action[1]) if action[0] == "F" else losses[action[1]].backward()
    return float(losses["0"].item() + losses["1"].item()), gradients(model)


def module_at(model: OmniModel, suffix: str) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith(suffix))


@contextmanager
def counted(model: OmniModel) -> Iterator[Counter[str]]:
    """Count the calls of every module."""
    calls: Counter[str] = Counter()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: calls.update([name])))
        yield calls


@contextmanager
def meanwhile(module: nn.Module, backward: Callable[[], None]) -> Iterator[None]:
    """Run a backward in another thread, in the next call of ``module``."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            backward()
        except BaseException as error:
            errors.append(error)

    def call(*_: object) -> None:
        handle.remove()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    handle = module.register_forward_pre_hook(call)
    yield
    if errors:
        raise errors[0]


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", CASES)
def test_two_micro_batches_in_flight_are_bitwise_one_after_the_other(family: str, order: str, recomputed: bool) -> None:
    model, packs = model_and_packs(family)
    recompute(model, recomputed)
    with counted(model) as calls:
        loss, expected = whole_step(model, packs)
    with counted(model) as calls_in_flight:
        found = step(family, order)
    assert calls_in_flight == calls
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert unequal(expected, found[1]) == {}


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("order", ORDERS[:2])
def test_delayed_weight_gradients_of_a_micro_batch_stay_in_its_store(order: str, recomputed: bool) -> None:
    model, packs = model_and_packs("qwen3_moe")
    recompute(model, recomputed)
    _, expected = whole_step(model, packs)
    stores = [WeightGradients(), WeightGradients()]
    model.zero_grad(set_to_none=True)
    count = sum(sum(pack.loss_counts().values()) for pack in packs)
    losses = []
    for pack, store in zip(packs, stores, strict=True):
        with delaying(store):
            losses.append(model(pack).losses["text"].sum / count)
    assert [len(store) for store in stores] == [0, 0]
    linears = sum(isinstance(module, nn.Linear) for block in blocks(model) for module in block.modules())
    for index in (int(action[1]) for action in order.split()[2:]):
        losses[index].backward()
        assert len(stores[index]) >= linears
    assert [len(store) for store in stores] == [len(stores[0])] * 2
    for store in stores:
        store.accumulate()
    assert unequal(expected, gradients(model)) == {}


def test_a_recording_follows_the_layers_of_its_own_thread() -> None:
    """A backward recomputes the recorded layers in another thread, in the middle of the forward."""
    model, packs = model_and_packs("qwen3_moe")
    recompute(model, True)

    def recorded(overlapping: bool) -> Recording:
        recording, first = Recording(), model(packs[0]).losses["text"].sum
        backward = first.backward if overlapping else lambda: None
        with (
            recording.recorded(model, packs[1].info.ids, packs[1].info.lengths),
            meanwhile(module_at(model, "mlp.gate"), backward),
        ):
            model(packs[1])
        return recording

    alone, overlapped = (recorded(overlapping).decisions for overlapping in (False, True))
    assert alone.keys() == overlapped.keys() and len(alone) >= 2
    assert all(torch.equal(alone[key], overlapped[key]) for key in alone)


def test_a_call_that_changes_a_module_is_the_only_one_in_all_threads() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)

    def forward() -> Tensor:
        with wrapped_forward(module, lambda rows: module.forward(rows) + 1):
            return module(x)

    with meanwhile(module, lambda: None), wrapped_forward(module, lambda rows: module.forward(rows)):
        assert torch.equal(forward(), module.forward(x) + 1)  # in its own thread it may be nested
    with (
        pytest.raises(AssertionError, match="two threads run Linear at once"),
        meanwhile(module, forward),
        wrapped_forward(module, lambda rows: module.forward(rows)),
    ):
        module(x)
    assert torch.equal(forward(), nn.functional.linear(x, module.weight, module.bias) + 1)


def test_contexts_around_calls_are_those_of_each_thread() -> None:
    """A forward ends while another thread is in a call of the same module: each leaves its own context."""
    module, log = nn.Identity(), []
    begun, ended = threading.Event(), threading.Event()

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        log.append(f"{name} in")
        yield
        log.append(f"{name} out")

    def in_both(_: nn.Module, arguments: tuple[str]) -> None:
        if arguments[0] == "backward":
            begun.set()
            ended.wait(10)
        else:
            thread.start()
            begun.wait(10)

    around_calls(module, lambda arguments, _: noted(arguments[0]))
    module.register_forward_pre_hook(in_both)
    thread = threading.Thread(target=module, args=["backward"])
    module("forward")
    ended.set()
    thread.join()
    assert log == ["forward in", "backward in", "forward out", "backward out"]
