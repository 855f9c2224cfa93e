"""``PackBudget``: the most that a pack may hold, in tokens and in what each encoder reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Measure, Sample
from omnitrain.errors import UserError
from omnitrain.plan.balance import assign_by_cost
from omnitrain.recipe.suggest import hint


@dataclass(frozen=True)
class PackBudget:
    """The most that a pack may hold; UserError: ``elements`` has a component that is not in ``media_names``."""

    tokens: int
    elements: Mapping[str, int] = field(default_factory=dict)  # component -> input elements; others have no limit
    media_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # component -> names of its media in a pack

    def __post_init__(self) -> None:
        if self.elements and not self.media_names:
            raise UserError("data.pack_elements: the media of the encoders are unknown; pass the model's `media_names`")
        problems = [
            f"data.pack_elements.{name}: unknown encoder; {hint(name, self.media_names)}"
            for name in sorted(self.elements.keys() - self.media_names.keys())
        ]
        if problems:
            raise UserError(*problems)

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Tokens, then the elements of each limited component."""
        return (self.tokens, *self.elements.values())

    def sizes(self, samples: Sequence[Sample | Measure]) -> list[list[int]]:
        """Return ``[limits][samples]``: how much of each of :attr:`limits` a sample takes."""
        found = [sample.elements for sample in samples] if self.elements else []
        of_components = [
            [sum([of_one.get(name, 0) for name in self.media_names[component]]) if of_one else 0 for of_one in found]
            for component in self.elements
        ]
        return [list(map(len, samples)), *of_components]

    def excess(self, sample: Sample | Measure) -> str:
        """Return why the sample alone exceeds the budget; empty: it does not."""
        if len(sample) > self.tokens:
            return f"{len(sample)} tokens, but a pack holds at most {self.tokens}"
        for (component, limit), (size,) in zip(self.elements.items(), self.sizes([sample])[1:], strict=True):
            if size > limit:
                return f"{component} reads {size:,} elements, but data.pack_elements allows {limit:,} in a pack"
        return ""


Held = TypeVar("Held", bound=Sample | Measure)


def fill_pack(held: Sequence[Held], budget: PackBudget, *, alone: bool = False) -> list[Held]:
    """Return the oldest of the samples ``held``, so that none waits forever, and the largest others that still fit.

    The largest one leaves the least room, by the sum of the squares of the free shares of all budgets (norm-based
    greedy of Panigrahy et al., 2011). ``alone``: make packs of one sample. Equal arguments give equal results on every
    machine.
    """
    if alone or held[0].is_alone:
        return [held[0]]
    others = [sample for sample in held[1:] if not sample.is_alone]
    if budget.elements:
        return [held[0], *_largest_by_all_budgets(held[0], others, budget)]
    chosen, free = [held[0]], budget.tokens - len(held[0])
    for one in sorted(others, key=lambda other: (-len(other), other.index)):
        if len(one) <= free:
            chosen.append(one)
            free -= len(one)
    return chosen


def _largest_by_all_budgets(first: Held, others: Sequence[Held], budget: PackBudget) -> Iterator[Held]:
    limits = np.array(budget.limits)[:, None]
    free = limits - np.array(budget.sizes([first]))
    sizes = np.array(budget.sizes(others))
    while sizes.size:
        left = free - sizes  # [budgets, samples]
        shares = left / limits
        squares = np.add.reduce(shares * shares)  # budget after budget, so with the same rounding on every machine
        squares[np.minimum.reduce(left) < 0] = np.inf
        best = int(squares.argmin())
        if squares[best] == np.inf:
            return
        free = left[:, best, None]
        sizes[:, best] = limits[:, 0] + 1  # it never fits again
        yield others[best]


def balanced_shares(samples: Sequence[Sample], num_shares: int) -> list[list[Sample]]:
    """Divide a pack's samples among ranks, about equal in tokens, in the same way on every machine."""
    if num_shares == 1:
        return [list(samples)]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    owners = assign_by_cost(np.zeros_like(lengths), lengths, np.array([num_shares]))
    return [[sample for sample, owner in zip(samples, owners, strict=True) if owner == k] for k in range(num_shares)]


def pack_all(samples: Iterable[Sample], capacity: int | PackBudget, *, alone: bool = False) -> Iterator[Pack]:
    """Yield packs of a finite stream, within ``capacity`` if a sample is; ValueError: one has too many tokens."""
    budget = PackBudget(capacity) if isinstance(capacity, int) else capacity
    held: list[Sample] = []
    room = budget.limits
    for sample in samples:
        if len(sample) > budget.tokens:
            raise ValueError(f"sample {sample.id!r} has {len(sample)} tokens, but a pack holds {budget.tokens}")
        is_alone = alone or sample.is_alone or any(other.is_alone for other in held)
        sizes = [size for (size,) in budget.sizes([sample])]
        if held and (is_alone or any(size > left for size, left in zip(sizes, room, strict=True))):
            yield Pack.from_samples(held)
            held, room = [], budget.limits
        held.append(sample)
        room = tuple(left - size for size, left in zip(sizes, room, strict=True))
    if held:
        yield Pack.from_samples(held)
