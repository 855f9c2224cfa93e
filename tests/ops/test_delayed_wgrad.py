"""Gradients of weights that a backward leaves for later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnitrain.ops.delayed_wgrad import WeightGradients, delayed_to, delaying
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
