"""Choose the samples of each pack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Measure, Sample
from omnitrain.plan.balance import assign_by_cost

Held = TypeVar("Held", bound=Sample | Measure)


def fill_pack(held: Sequence[Held], budget: PackBudget, *, alone: bool = False) -> list[Held]:
    """Return the oldest sample and the largest others that still fit, so packs are dense and no sample waits forever.

    The largest sample is the longest one. If encoders have budgets, it is the one that leaves the least room, by the
    sum of the squares of the free shares of all budgets (norm-based greedy of Panigrahy et al., 2011): a pack that has
    many images already takes texts.

    ``held`` are samples in order of arrival, each within the budget; not empty. ``alone``: make packs of one sample.
    Equal arguments give equal results on every machine.
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
    """Divide the samples of a pack among several ranks, with about as many tokens for every rank, or none.

    Equal arguments give equal results on every machine.
    """
    if num_shares == 1:
        return [list(samples)]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    owners = assign_by_cost(np.zeros_like(lengths), lengths, np.array([num_shares]))
    return [[sample for sample, owner in zip(samples, owners, strict=True) if owner == k] for k in range(num_shares)]


def pack_all(samples: Iterable[Sample], capacity: int | PackBudget, *, alone: bool = False) -> Iterator[Pack]:
    """Yield packs of a finite stream, for evaluation. Every sample is used once.

    ``capacity``: the most that a pack may hold, or the most tokens. A sample whose media exceed it has its own pack.

    Raises:
        ValueError: a sample has more tokens than a pack may hold.
    """
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
