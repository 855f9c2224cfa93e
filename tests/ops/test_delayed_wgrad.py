"""Gradients of weights that a backward leaves for later."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.ops.delayed_wgrad import WeightGradients, delayed_to, delaying
from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.parallel.memory.recompute import recompute_blocks
from tests.parallel import factories


def test_linears_of_attention_leave_their_weights_gradients_and_nothing_else() -> None:
    torch.manual_seed(0)
    attention = factories.qwen3().model.layers[0].self_attn
    linears = [part for part in attention.modules() if isinstance(part, nn.Linear)]
    linears[0].weight.requires_grad_(False)
    hidden = torch.randn(2, 24, linears[0].in_features)
    angles = torch.randn(2, 24, attention.head_dim)
    work = WeightGradients()

    def trained(delayed: bool) -> list[torch.Tensor]:
        attention.zero_grad()
        own = hidden.clone().requires_grad_()
        with delaying(work if delayed else None):
            (first, _), (second, _) = (
                attention(own, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None) for _ in range(2)
            )
        (first.square().sum() + second.sum()).backward()
        assert own.grad is not None
        if delayed:
            assert len(work) == 2 * 3 and all(linear.weight.grad is None for linear in linears)
            work.accumulate()
            assert len(work) == 0
            assert all(p.grad is None or p.grad.grad_fn is None for p in attention.parameters())
        return [own.grad, *(p.grad for p in attention.parameters() if p.requires_grad)]

    expected = trained(delayed=False)
    for found, gradient in zip(trained(delayed=True), expected, strict=True):
        assert torch.equal(found, gradient)
    assert linears[0].weight.grad is None


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_micro_batches_in_flight_have_stores_of_their_own(order: tuple[int, int], recomputed: bool) -> None:
    """What is recomputed gets the store of its forward, whatever ran since then."""
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)), torch.randn(2, 5, 8)
    stores = [WeightGradients(), WeightGradients()]

    def run(x: torch.Tensor) -> torch.Tensor:
        if not recomputed:
            return module(x)
        contexts = lambda store: (delaying(store), delaying(store))  # noqa: E731
        return checkpoint(module, x, use_reentrant=False, context_fn=partial(contexts, delayed_to()))

    outputs = []
    for x, store in zip(inputs, stores, strict=True):
        with delaying(store):
            outputs.append(run(x.clone().requires_grad_()))
    for index in order:
        outputs[index].square().sum().backward()
        assert len(stores[index]) == 2
    assert all(linear.weight.grad is None for linear in (module[0], module[2]))
    for index in order:
        stores[index].accumulate()
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    for x in inputs:
        module(x.clone().requires_grad_()).square().sum().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(found, module.parameters(), strict=True))


def test_gradients_of_a_weight_that_a_forward_uses_often_are_added_up_before_those_of_other_forwards() -> None:
    torch.manual_seed(0)
    linear, inputs = nn.Linear(8, 8), torch.randn(4, 3, 5, 8)

    def trained(work: WeightGradients | None) -> Tensor:
        linear.zero_grad()
        for parts in inputs:
            with delaying(work):
                loss = torch.stack([linear(part).square().sum() for part in parts]).sum()
            loss.backward()
            if work is not None:
                work.accumulate()
        assert linear.weight.grad is not None
        return linear.weight.grad

    assert torch.equal(trained(WeightGradients()), trained(None))


def flops_of_grouped_mm(rows: tuple[int, int], other: tuple[int, ...], *_: object, **__: object) -> int:
    """Rows of all experts by their matrices ``[E, K, N]``, or ``[M, rows]`` by ``[rows, N]``."""
    return 2 * rows[0] * rows[1] * other[-1]


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_both_parts_of_a_backward_have_its_bits_and_compute_its_products_once(family: str, recomputed: bool) -> None:
    """So both together take as long, and a quarter or more of it can wait."""
    torch.manual_seed(0)
    model = getattr(factories, family)().train()
    use_omnitrain_experts(model)
    if recomputed:
        recompute_blocks(block for block in model.modules() if isinstance(block, GradientCheckpointingLayer))
    ids = torch.randint(0, model.config.vocab_size, (1, 48))

    def step(work: WeightGradients | None) -> tuple[list[int], list[Tensor | None]]:
        model.zero_grad()
        with delaying(work):
            loss = model(ids, use_cache=False).logits.float().logsumexp(-1).sum()
        parts = [loss.backward, *([work.accumulate] if work is not None else [])]
        flops = []
        for part in parts:
            counter = FlopCounterMode(
                display=False, custom_mapping={torch.ops.aten._grouped_mm.default: flops_of_grouped_mm}
            )
            with counter:
                part()
            flops.append(counter.get_total_flops())
        return flops, [parameter.grad for parameter in model.parameters()]

    (whole,), expected = step(None)
    (of_inputs, of_weights), found = step(WeightGradients())
    assert of_weights >= (0.19 if recomputed else 0.25) * whole
    # A recomputation ends at the last tensor that is saved: a linear layer's input, which a delayed one saves last.
    assert whole <= of_inputs + of_weights <= (1.1 if recomputed and family == "qwen3" else 1) * whole
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)
    assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]


def test_only_the_forward_that_delays_sees_another_linear() -> None:
    layer, x, graphs = nn.Linear(4, 4), torch.randn(2, 4), {}

    def forward(name: str) -> None:
        graphs[name] = type(layer(x).grad_fn).__name__

    plain = F.linear
    forward("before")
    with delaying(WeightGradients()):
        forward("delaying")
        with delaying(None):
            forward("not delaying")
        thread = threading.Thread(target=forward, args=["thread"])
        thread.start()
        thread.join()
    forward("after")
    assert graphs == dict.fromkeys(graphs, "AddmmBackward0") | {"delaying": "_DelayedLinearBackward"}
    assert F.linear is plain
