"""Which samples share a pack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
from omnitrain.plan.balance import assign_by_cost


class Packable(Protocol):
    """What takes a place in a pack, as :class:`Sample` does."""

    @property
    def index(self) -> int:
        """Place in the order of arrival."""
        ...

    @property
    def is_alone(self) -> bool:
        """No other may be in its pack."""
        ...

    def __len__(self) -> int:
        """Tokens."""
        ...


Held = TypeVar("Held", bound=Packable)


def num_tokens(samples: Sequence[Packable]) -> int:
    """Tokens of all ``samples`` together."""
    return sum(len(sample) for sample in samples)


def fill_pack(held: Sequence[Held], capacity: int, *, alone: bool = False) -> list[Held]:
    """The oldest sample, then the longest ones that still fit: dense packs in which nobody waits for ever.

    Args:
        held: samples in order of arrival, none longer than ``capacity``; not empty.
        capacity: length of a pack, tokens.
        alone: one sample per pack, for a model that cannot keep several apart.
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
    """The samples of a pack for several ranks: all of them, each once, with about as many tokens for every rank.

    Returns:
        ``num_shares`` lists, some of them empty where samples are few. Equal arguments give equal answers everywhere.
    """
    if num_shares == 1:
        return [list(samples)]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    owners = assign_by_cost(np.zeros_like(lengths), lengths, np.array([num_shares]))
    return [[sample for sample, owner in zip(samples, owners, strict=True) if owner == k] for k in range(num_shares)]


def pack_all(samples: Iterable[Sample], capacity: int, *, alone: bool = False) -> Iterator[Pack]:
    """Packs of a finite stream, for evaluation; every sample is used once. Arguments as in :func:`fill_pack`.

    Raises:
        ValueError: a sample longer than ``capacity``.
    """
    held: list[Sample] = []
    for sample in samples:
        if len(sample) > capacity:
            raise ValueError(f"sample {sample.id!r} has {len(sample)} tokens, a pack holds {capacity}")
        is_alone = alone or sample.is_alone or any(other.is_alone for other in held)
        if held and (is_alone or num_tokens(held) + len(sample) > capacity):
            yield Pack.from_samples(held)
            held = []
        held.append(sample)
    if held:
        yield Pack.from_samples(held)


class OmniDataCollatorWithPacking:
    """Collate function for a user's own ``DataLoader``: a list of samples becomes one :class:`Pack`."""

    def __call__(self, samples: Sequence[Sample]) -> Pack:
        """Lay ``samples`` end to end."""
        return Pack.from_samples(samples)
