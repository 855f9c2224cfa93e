"""Ranks that hold the same samples: one of them prepares and packs, and the others receive its packs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from omnitrain.data.loading.slots import RankShare, SlotState, share_of_rank
from omnitrain.data.loading.socket_message import as_bytes
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected

Swap = Callable[[Sequence[bytes]], list[bytes]]


@dataclass(frozen=True)
class PackedStep:
    """The packs of some slots for a step.

    Attributes:
        shares: the packs of each rank that gets a share of them; one share if no other rank does.
        slots: slot -> its state after the step.
        rejected: rows that were rejected while the step was made.
    """

    shares: tuple[tuple[Pack, ...], ...]
    slots: Mapping[int, SlotState]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class SameSamples:
    """Which ranks of a run hold the same samples, as seen by one of them.

    Attributes:
        shares: each rank's share of a step.
        firsts: for each rank, the rank that prepares its samples.
        rank: this rank.
        swap: sends a parcel to every rank and returns those of all ranks; all ranks must call it.
    """

    shares: tuple[RankShare, ...]
    firsts: tuple[int, ...]
    rank: int
    swap: Swap

    @classmethod
    def of(cls, data_ranks: Sequence[int | None], size: int, slots: int, rank: int, swap: Swap) -> SameSamples | None:
        """Return None if every rank holds other samples.

        Args:
            data_ranks: each rank's rank among those that draw different samples; None: it draws none.
            size: number of ranks that draw different samples.
            slots: packs of a step.
            rank: this rank.
            swap: see :attr:`swap`.
        """
        shares = tuple(share_of_rank(data_rank, size, slots) for data_rank in data_ranks)
        first_of: dict[tuple[int, ...], int] = {}
        firsts = tuple(first_of.setdefault(share.slots, i) if share.slots else i for i, share in enumerate(shares))
        return None if firsts == tuple(range(len(shares))) else cls(shares, firsts, rank, swap)

    @property
    def is_first(self) -> bool:
        """Whether this rank prepares its samples itself."""
        return self.firsts[self.rank] == self.rank

    def receive(self) -> Generator[PackedStep, None, None]:
        """Yield the steps of this rank, which another rank sends."""
        nothing = [b""] * len(self.shares)
        while True:
            yield pickle.loads(self.swap(nothing)[self.firsts[self.rank]])

    def send(self, steps: Iterator[PackedStep]) -> Generator[PackedStep, None, None]:
        """Yield the steps of this rank, and send those of other ranks that hold the same samples to them."""
        others = [rank for rank, first in enumerate(self.firsts) if first == self.rank != rank]
        for step in steps:
            parcels: dict[int, bytes] = {}
            for share in {self.shares[rank].share for rank in others}:
                parcels[share] = as_bytes(PackedStep((step.shares[share],), step.slots, ()))
            sent = [b""] * len(self.shares)
            for rank in others:
                sent[rank] = parcels[self.shares[rank].share]
            self.swap(sent)
            yield PackedStep((step.shares[self.shares[self.rank].share],), step.slots, step.rejected)
