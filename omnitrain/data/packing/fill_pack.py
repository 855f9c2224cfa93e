"""Choose the samples of each pack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.plan.balance import assign_by_cost


class Packable(Protocol):
    """An object that can be packed, such as a :class:`Sample`."""

    @property
    def index(self) -> int:
        """Position in the order of arrival."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether it must be alone in its pack."""
        ...

    @property
    def piece(self) -> int:
        """Its number among the pieces of its row."""
        ...

    @property
    def num_pieces(self) -> int:
        """Number of pieces of its row."""
        ...

    @property
    def pieces(self) -> Sequence[Self]:
        """All pieces of its row, if it is the first."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...


Held = TypeVar("Held", bound=Packable)


def num_tokens(samples: Sequence[Packable]) -> int:
    """Return the number of tokens of all ``samples`` together."""
    return sum(len(sample) for sample in samples)


def fill_pack(held: Sequence[Held], capacity: int, *, alone: bool = False) -> list[Held]:
    """Return the oldest sample and the longest others that still fit, so packs are dense and no sample waits forever.

    Args:
        held: samples in order of arrival, none longer than ``capacity``; not empty.
        capacity: length of a pack in tokens.
        alone: make packs of one sample, for a model that cannot keep several samples apart.
    """
    chosen, free = [held[0]], capacity - len(held[0])
    if alone or chosen[0].is_alone:
        return chosen
    for sample in sorted(held[1:], key=lambda sample: (-len(sample), sample.index)):
        if len(sample) <= free and not sample.is_alone:
            chosen.append(sample)
            free -= len(sample)
    return chosen


def balanced_shares(samples: Sequence[Sample], num_shares: int) -> list[list[Sample]]:
    """Divide the samples of a pack among several ranks, with about as many tokens for every rank.

    Returns:
        ``num_shares`` lists that contain each sample once; some are empty if samples are few. Equal arguments give
        equal results on every machine.
    """
    if num_shares == 1:
        return [list(samples)]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    owners = assign_by_cost(np.zeros_like(lengths), lengths, np.array([num_shares]))
    return [[sample for sample, owner in zip(samples, owners, strict=True) if owner == k] for k in range(num_shares)]


def pack_all(samples: Iterable[Sample], capacity: int, *, alone: bool = False) -> Iterator[Pack]:
    """Yield packs of a finite stream, for evaluation. Every sample is used once. Arguments as in :func:`fill_pack`.

    Raises:
        ValueError: a sample is longer than ``capacity``.
    """
    held: list[Sample] = []
    for sample in samples:
        if len(sample) > capacity:
            raise ValueError(f"sample {sample.id!r} has {len(sample)} tokens, but a pack holds {capacity}")
        is_alone = alone or sample.is_alone or any(other.is_alone for other in held)
        if held and (is_alone or num_tokens(held) + len(sample) > capacity):
            yield Pack.from_samples(held)
            held = []
        held.append(sample)
    if held:
        yield Pack.from_samples(held)
