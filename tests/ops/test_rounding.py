"""A bound from rounding lets another order of sums pass, and finds an error."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from omnitrain.ops.rounding import DRAWS, Rounding, Step, nudge


@lru_cache(maxsize=1)
def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"first": (64, 64), "bias": (64,), "last": (64, 64), "scale": (1,)}
    made = {name: torch.randn(shape, generator=draw) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return {name: nn.Parameter(value.bfloat16()) for name, value in made.items()}


def step(parts: int = 1, times: float = 1.0) -> Step:
    """Two layers in bf16. ``parts``: in so many the rows of `last` are added up, as tensor parallel ranks do."""
    w = weights()
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    hidden = layer_norm(silu(rows @ w["first"] + w["bias"]), (64,))
    products = [h @ m for h, m in zip(hidden.chunk(parts, dim=1), w["last"].chunk(parts), strict=True)]
    out = torch.stack(products).sum(0) * w["scale"]
    loss = out.float().logsumexp(-1).sum()
    found = torch.autograd.grad(loss * times, [*w.values()])
    return loss.item(), dict(zip(w, found, strict=True))


@lru_cache(maxsize=1)
def measured() -> Rounding:
    return Rounding.measure(step, weights(), lambda _: torch.bfloat16)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_sums_in_another_order_differ_by_rounding(parts: int) -> None:
    got = step(parts)
    assert not all(torch.equal(got[1][name], gradient) for name, gradient in step()[1].items())
    assert measured().beyond(got) == {}


def test_a_gradient_that_is_multiplied_is_found_from_the_factor_that_is_visible() -> None:
    visible = measured().visible
    assert 0.001 < visible < 0.03
    for times, is_found in ((1 + 0.5 * visible, False), (1 + 1.5 * visible, True), (1 - 1.5 * visible, True)):
        beyond = measured().beyond((step()[0], {n: g.float() * times for n, g in step()[1].items()}))
        assert bool(beyond) == is_found, beyond
        assert all(found.scale == pytest.approx(times - 1, abs=1e-4) for found in beyond.values())


def test_a_gradient_that_no_weight_changes_is_rounded_too() -> None:
    gradient = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5
    rounding = Rounding.measure(lambda: (1.0, {"bias": gradient}), {}, lambda _: torch.bfloat16)
    assert rounding.beyond((1.0, {"bias": gradient.bfloat16()})) == {}
    assert rounding.beyond((1.0, {"bias": gradient * 1.02}))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda loss, gradients: (loss * 1.1, gradients), id="another loss"),
        pytest.param(lambda loss, gradients: (loss, {"first": gradients["first"]}), id="gradients that never came"),
        pytest.param(lambda loss, gradients: (loss, gradients | {"new": torch.ones(3)}), id="one that nobody expects"),
        pytest.param(lambda loss, gradients: (loss, gradients | {"bias": gradients["bias"].flip(0)}), id="other rows"),
        pytest.param(lambda loss, gradients: (loss, gradients | {"bias": gradients["bias"] * torch.nan}), id="nan"),
        pytest.param(lambda loss, gradients: (torch.nan, gradients), id="a loss that is no number"),
    ],
)
def test_an_error_is_no_rounding(changed: partial[Step]) -> None:
    loss, gradients = step()
    assert measured().beyond((loss, gradients)) == {}
    assert measured().beyond(changed(loss, gradients))


def test_a_message_says_what_was_found_and_what_rounding_explains() -> None:
    rounding = Rounding((1.0, {"w": torch.tensor([3.0, 4.0])}), [(1.0, {"w": torch.tensor([3.0, 4.05])})])
    (across,) = rounding.beyond((1.0, {"w": torch.tensor([4.0, 3.0])})).values()
    (along,) = rounding.beyond((1.0, {"w": torch.tensor([3.15, 4.2])})).values()
    assert str(across) == "off by 2.8e-01 of its norm, 3.0e-02 allowed"
    assert str(along) == "off by 5.0e-02 of its norm, 3.0e-02 allowed"
    wide = Rounding((1.0, {"w": torch.tensor([3.0, 4.0])}), [(1.0, {"w": torch.tensor([3.08, 3.94])})])
    (scaled,) = wide.beyond((1.0, {"w": torch.tensor([3.06, 4.08])})).values()
    assert str(scaled) == "multiplied by 1.0200, 1.0000 allowed"


def test_each_weight_moves_to_a_neighbour_in_the_dtype_of_the_computation_and_back() -> None:
    before = {"low": torch.tensor([1.0, -2.0, 0.3]), "high": torch.tensor([1.0, 1.0, 1.0])}
    moved = {name: value.clone() for name, value in before.items()}
    nudge(moved, lambda name: torch.bfloat16 if name == "low" else torch.float32, seed=0)
    assert all(value.dtype is torch.float32 for value in moved.values())
    relative = {name: ((moved[name] - value) / value).abs() for name, value in before.items()}
    assert ((relative["low"] > 2**-9) & (relative["low"] < 2**-6)).all()
    assert ((relative["high"] > 2**-25) & (relative["high"] < 2**-22)).all()

    kept = {name: weight.detach().clone() for name, weight in weights().items()}
    calls = []
    Rounding.measure(lambda: calls.append(1) or step(), weights(), lambda _: torch.bfloat16)
    assert len(calls) == DRAWS + 1
    assert all(torch.equal(weight, kept[name]) for name, weight in weights().items())
