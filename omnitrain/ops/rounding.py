"""Measure how rounding changes a training step, and whether another computation of the step differs by more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DRAWS = 6
FACTOR = 3.0
"""Of seven normal numbers, the last is above 3 times the largest of the others once in 370 times; if it is spread half
as much, once in 14,000; if 0.3 times as much, which is what tensor parallel ranks were measured at, once in 280,000."""
Step = tuple[float, Mapping[str, Tensor]]
"""The loss of a training step, and parameter name -> its gradient."""
LOSS = "loss"


@dataclass(frozen=True)
class Deviation:
    """How far a tensor is from the same one in another computation, relative to its norm."""

    distance: float  # norm of the difference
    scale: float  # part of the difference along the tensor: 0.02 if all of it is multiplied by 1.02
    most_distance: float  # the distance that rounding explains
    most_scale: float  # the absolute scale that rounding explains

    @property
    def excess(self) -> float:
        """The deviation as a multiple of the deviation that rounding explains; above 1, it is an error."""
        return max(_ratio(self.distance, self.most_distance), _ratio(abs(self.scale), self.most_scale))

    def __str__(self) -> str:
        if _ratio(self.distance, self.most_distance) <= 1:
            return f"multiplied by {1 + self.scale:.4f}, {1 + self.most_scale:.4f} allowed"
        return f"off by {self.distance:.1e} of its norm, {self.most_distance:.1e} allowed"


class Rounding:
    """Bounds for a training step that is computed in another way, in the same precision.

    They come from the step itself, run again with every weight moved to a neighbouring number (:func:`nudge`), and then
    every gradient, which is rounded when it is made. Each such draw changes the loss and all gradients as rounding
    does, but more: a product is rounded by half the spacing of numbers at most, and a weight moves by a whole one.
    Another way to compute the step (other ranks, other sums) may change a tensor by :data:`FACTOR` times the largest
    change of the draws. Rounding has no preferred direction. So the part of a change along the tensor itself is
    compared, too, as one number: it tells a gradient that is multiplied by 1.02 from one in which rounding changes each
    number by a tenth.
    """

    def __init__(self, expected: Step, draws: Iterable[Step]) -> None:
        """Compare the step with :data:`DRAWS` draws of it with moved weights and gradients, one at a time."""
        self._expected = _tensors(expected)
        self._most = dict.fromkeys(self._expected, (0.0, 0.0))
        for draw in draws:
            for name, (distance, along) in self._differences(draw):
                most = self._most.get(name, (0.0, 0.0))
                self._most[name] = max(most[0], distance), max(most[1], abs(along))

    @classmethod
    def measure(
        cls, step: Callable[[], Step], weights: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype]
    ) -> Rounding:
        """Run ``step``, a function of the ``weights`` alone, as it is and with moved weights and gradients."""
        kept = {name: weight.detach().clone() for name, weight in weights.items()}

        @torch.no_grad()
        def restore() -> None:
            for name, weight in weights.items():
                weight.copy_(kept[name])

        def moved(seed: int) -> Step:
            restore()
            nudge(weights, dtype_of, seed)
            loss, gradients = step()
            made = {name: gradient.clone() for name, gradient in gradients.items()}
            nudge(made, dtype_of, seed)
            return loss, made

        try:
            return cls(step(), map(moved, range(DRAWS)))
        finally:
            restore()

    @property
    def visible(self) -> float:
        """The smallest visible error of all gradients: at 0.02, one sees that they are multiplied by 1.02."""
        norms = {name: _norm(tensor) for name, tensor in self._expected.items() if name != LOSS}
        return min((FACTOR * self._most[name][1] / norm**2 for name, norm in norms.items() if norm), default=0.0)

    def deviations(self, step: Step) -> dict[str, Deviation]:
        """Return ``loss`` and parameter name -> how far it is off; a missing gradient counts as zeros."""
        found = {}
        for name, (distance, along) in self._differences(step):
            norm = (_norm(self._expected[name]) if name in self._expected else 0.0) or 1.0
            most, most_along = (FACTOR * most for most in self._most.get(name, (0.0, 0.0)))
            found[name] = Deviation(distance / norm, along / norm**2, most / norm, most_along / norm**2)
        return found

    def beyond(self, step: Step) -> dict[str, Deviation]:
        """Return what rounding does not explain; empty if nothing is wrong."""
        return {name: found for name, found in self.deviations(step).items() if found.excess > 1}

    def _differences(self, step: Step) -> Iterator[tuple[str, tuple[float, float]]]:
        """Name -> norm of the difference, and its product with the expected tensor."""
        got = _tensors(step)
        for name in dict.fromkeys([*self._expected, *got]):
            like = self._expected.get(name, got.get(name))
            assert like is not None
            expected, other = (tensors.get(name, torch.zeros_like(like)) for tensors in (self._expected, got))
            difference = other.double() - expected.double()
            yield name, (_norm(difference), float((difference * expected).sum()))


@torch.no_grad()
def nudge(weights: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype], seed: int) -> None:
    """Move each number of the weights to its next larger or smaller one, at random, in place.

    ``weights`` are not sharded; ``dtype_of`` a name is the dtype in which the model computes, whose neighbours count.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        dtype = dtype_of(name)
        up = torch.rand(weight.shape, generator=generator) < 0.5
        largest = torch.tensor(torch.inf, dtype=dtype, device=weight.device)
        towards = torch.where(up.to(weight.device), largest, -largest)
        weight.copy_(torch.nextafter(weight.to(dtype), towards))


def _ratio(found: float, most: float) -> float:
    if not found:
        return 0.0
    return found / most if most and not math.isnan(found) else math.inf


def _tensors(step: Step) -> dict[str, Tensor]:
    loss, gradients = step
    return {LOSS: torch.tensor([loss], dtype=torch.float64), **gradients}


def _norm(tensor: Any) -> float:
    return float(tensor.double().norm())
