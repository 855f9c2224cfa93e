"""Blocks of attention: the formula against torch's kernel."""

import torch
from torch import Tensor

from omnitrain.ops.attention.online_softmax import Scoring, attend_block, attend_block_backward
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.plan.ring import CAUSAL, MASKED, Block

HEADS, LENGTH, WIDTH = 4, 128, 32


def errors_of(kind: str, states: list[Tensor], grad: Tensor) -> list[float]:
    """Of the gradients of a causal block in bf16, relative to their norms in fp64."""
    run = (0, LENGTH)
    scoring = Scoring(MaskSpec(run, causal=True), WIDTH**-0.5, None)
    block = Block(run, run, kind)
    out, lse = attend_block(tuple(states), block, scoring)
    found = attend_block_backward(grad, tuple(states), out.to(grad.dtype), lse, block, scoring)
    exact = [state.double().requires_grad_() for state in states]
    query, key, value = exact
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = torch.autograd.grad(output, exact, grad.double())
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


def test_gradients_of_a_block_in_bfloat16_are_as_exact_as_those_of_the_kernel() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(HEADS, LENGTH, WIDTH, generator=draw) for _ in range(4))
    states, grad = [query.bfloat16(), key.bfloat16(), (value + 2).bfloat16()], grad.bfloat16()  # values have a mean
    for formula, kernel in zip(errors_of(MASKED, states, grad), errors_of(CAUSAL, states, grad), strict=True):
        assert formula <= kernel
