"""Ranks that hold the same samples: one of them prepares and packs, and the others receive its packs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omnitrain.data.loading.slots import RankShare, SlotState, share_of_rank
from omnitrain.data.loading.socket_message import as_bytes
from omnitrain.data.packing.sample import Rejected

Swap = Callable[[Sequence[bytes]], list[bytes]]


@dataclass(frozen=True)
class MadeStep:
    """A step of some slots."""

    made: Any  # the packs of each share of the slots; at the end, what the training process gets
    slots: Mapping[int, SlotState]  # after the step
    rejected: tuple[Rejected, ...]  # while the step was made


@dataclass(frozen=True)
class SameSamples:
    """Which ranks of a run hold the same samples, as seen by one of them."""

    shares: tuple[RankShare, ...]  # of each rank
    firsts: tuple[int, ...]  # of each rank: the rank that prepares its samples
    rank: int
    swap: Swap

    @classmethod
    def of(cls, data_ranks: Sequence[int | None], size: int, slots: int, rank: int, swap: Swap) -> SameSamples | None:
        """Return which ranks hold the same samples; None if every rank holds other ones.

        ``data_ranks`` has each rank's rank among the ``size`` that draw different samples; None: it draws none. All
        ranks must call ``swap``, which sends a parcel to every rank and returns those of all ranks.
        """
        shares = tuple(share_of_rank(data_rank, size, slots) for data_rank in data_ranks)
        first_of: dict[tuple[int, ...], int] = {}
        firsts = tuple(first_of.setdefault(share.slots, i) if share.slots else i for i, share in enumerate(shares))
        return None if firsts == tuple(range(len(shares))) else cls(shares, firsts, rank, swap)

    @property
    def is_first(self) -> bool:
        """Whether this rank prepares its samples itself."""
        return self.firsts[self.rank] == self.rank

    def receive(self) -> Generator[MadeStep, None, None]:
        """Yield the steps of this rank, which another rank sends."""
        nothing = [b""] * len(self.shares)
        while True:
            yield pickle.loads(self.swap(nothing)[self.firsts[self.rank]])

    def send(self, steps: Iterator[MadeStep]) -> Generator[MadeStep, None, None]:
        """Yield the steps of this rank, and send those of other ranks that hold the same samples to them."""
        others = [rank for rank, first in enumerate(self.firsts) if first == self.rank != rank]
        for step in steps:
            of_shares = {self.shares[rank].share for rank in others}
            parcels = {share: as_bytes(MadeStep((step.made[share],), step.slots, ())) for share in of_shares}
            self.swap([parcels[one.share] if rank in others else b"" for rank, one in enumerate(self.shares)])
            yield replace(step, made=(step.made[self.shares[self.rank].share],))
