"""What the comparison of a model with plain transformers takes for rounding, and what for an error."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.acceptance import beyond_rounding, staying_in_fp64
from tests.models.plain import doubling


def key_bias_gradient(*, halves: bool) -> Tensor:
    """Of attention without positions, where it is zero: the bias adds the same to every score of a query.

    ``halves``: features are added up half by half, as two ranks add them up.
    """
    draw = torch.Generator().manual_seed(0)
    rows, query, key, value = (torch.randn(9, 64, generator=draw, dtype=torch.float32) for _ in range(4))
    bias = torch.full((64,), 0.3, requires_grad=True)
    made = F.softmax(query @ (key + bias).t(), dim=-1, dtype=torch.float32)
    parts = [slice(0, 32), slice(32, 64)] if halves else [slice(0, 64)]
    scores = torch.stack([(made @ value[:, part] * rows[:, part]).sum() for part in parts])
    scores.sum().backward()
    assert bias.grad is not None
    return bias.grad


def in_fp64(*, halves: bool) -> Tensor:
    with doubling():
        return key_bias_gradient(halves=halves)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_error_however_far_rounding_goes() -> None:
    plain, exact = key_bias_gradient(halves=False), in_fp64(halves=False)
    ours, wide = key_bias_gradient(halves=True), in_fp64(halves=True)
    assert wide.dtype is torch.float64 and exact.abs().max() < 1e-12 < plain.abs().max()
    by_chance = {"bias": ours * 50}  # further from zero than plain transformers is
    assert beyond_rounding({"bias": 1.0}, by_chance, {"bias": plain}, {"bias": exact})
    assert staying_in_fp64({"bias": 1.0}, by_chance, {"bias": wide}, {"bias": exact}) == {}


def test_an_error_is_one_in_numbers_of_any_width() -> None:
    exact = {"weight": in_fp64(halves=False) + 1.0}
    narrow, wide = ({name: value.to(dtype) * 1.001 for name, value in exact.items()} for dtype in (torch.float32, None))
    assert staying_in_fp64({"weight": 1e-3}, narrow, wide, exact) == {"weight": 1e-3}
    assert staying_in_fp64({"weight": 1.0}, {}, {}, exact) == {"weight": 1.0}  # a gradient that never came
    assert staying_in_fp64({"loss": 1e-4}, {}, {}, {}) == {"loss": 1e-4}  # a loss is no gradient


def test_a_step_in_fp64_casts_nothing_down_in_its_backward() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.float() / 3

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient.to(torch.float32) / 3

    with doubling():
        linear = nn.Linear(4, 4)
        Halved.apply(linear(torch.ones(2, 4))).sum().backward()
    assert linear.weight.grad is not None and linear.weight.grad.dtype is torch.float64
    torch.testing.assert_close(linear.weight.grad, torch.full((4, 4), 2 / 3, dtype=torch.float64), rtol=1e-15, atol=0)
    assert torch.get_default_dtype() is torch.float32
