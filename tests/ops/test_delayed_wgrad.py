"""Gradients of weights that a backward leaves for later."""

from __future__ import annotations

import torch
from torch import nn

from omnitrain.ops.delayed_wgrad import WeightGradients, delayed_linears
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
        with delayed_linears([attention] if delayed else [], work):
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
    assert linears[0].weight.grad is None and not any("forward" in vars(linear) for linear in linears)


def test_what_has_another_forward_keeps_it() -> None:
    linear = nn.Linear(2, 2)
    linear.forward = lambda x: x
    with delayed_linears([linear], WeightGradients()):
        assert linear(5) == 5
    assert linear(5) == 5
