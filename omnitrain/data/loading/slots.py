"""Slots: the independent packers of a run, their states, and the ranks that run them.

A step has one pack per slot (``train.packs_per_step`` slots), and each slot draws different samples. So the samples of
a step follow from the recipe alone, and the ranks only divide the packs among themselves.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from omnitrain.data.loading.data_process import as_bytes
from omnitrain.data.loading.order import ORDER_VERSION
from omnitrain.data.packing.sample import Rejected
from omnitrain.errors import UserError


@dataclass(frozen=True)
class RankShare:
    """A rank's share of every step: the packs of ``slots``, and of each pack share ``share`` of ``num_shares``."""

    slots: tuple[int, ...]
    share: int = 0
    num_shares: int = 1


def share_of_rank(rank: int | None, ranks: int, slots: int) -> RankShare:
    """Divide a step among the ranks that draw data. Up to ``slots`` ranks get whole packs; more ranks share them.

    Where the numbers do not fit, some ranks have a pack less than others, or share theirs with more ranks. A rank that
    draws none (None) has no slots.

    For example::

        4 slots, 2 ranks    rank 0: slots 0, 2             rank 1: slots 1, 3
        4 slots, 3 ranks    rank 0: slots 0, 3             rank 1: slot 1               rank 2: slot 2
        2 slots, 4 ranks    ranks 0, 2: halves of slot 0   ranks 1, 3: halves of slot 1
        2 slots, 3 ranks    ranks 0, 2: halves of slot 0   rank 1: slot 1
    """
    if rank is None:
        return RankShare(())
    assert 0 <= rank < ranks
    if ranks <= slots:
        return RankShare(tuple(range(rank, slots, ranks)))
    slot = rank % slots
    return RankShare((slot,), share=rank // slots, num_shares=len(range(slot, ranks, slots)))


@dataclass(frozen=True)
class SlotState:
    """The state of a slot, from which it resumes."""

    next_index: int  # global index of its first sample that was not drawn yet
    held: tuple[int, ...] = ()  # indices of samples that were drawn but not packed yet, oldest first
    rejected: Mapping[str, int] = field(default_factory=dict)  # source -> rows; not counted again in later epochs
    held_pieces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # index in `held` -> unpacked pieces
    num_packs: int = 0  # made so far, which is the number of steps
    begun: tuple[int, ...] = ()  # index at which the slot began the second and each later stage
    fatal: tuple[Rejected, ...] = ()  # missed their deadline or crashed a decoder: rejected whenever they are drawn

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Self:
        """Return the state that ``asdict`` turned into ``saved``."""
        return cls(**(dict(saved) | {"fatal": tuple(Rejected(**row) for row in saved.get("fatal", ()))}))


@dataclass(frozen=True)
class LoaderState:
    """The state of a run's data. It does not depend on the number of ranks."""

    slots: Mapping[int, SlotState] = field(default_factory=dict)  # of merged ranks; empty: the beginning of a run
    rejected: tuple[Rejected, ...] = ()  # rows skipped so far, each once; on one rank, those before and its own
    order_version: int = ORDER_VERSION
    tokens_per_draw: tuple[float, ...] = ()  # mean of each source, for weights of tokens; empty: weights of draws
    skipped: tuple[int, ...] = ()  # first samples of each source, if it is a stream, that need not be read again

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Self:
        """Return the state that ``asdict`` made ``saved``; UserError: it is of another order of data."""
        if (version := saved.get("order_version", 1)) != ORDER_VERSION:
            raise UserError(
                f"the run began with version {version} of the order of data, and this version of omnitrain has only "
                f"version {ORDER_VERSION}; start a new run from its weights (`model.checkpoint`), or go on with the "
                "version of omnitrain that began it"
            )
        slots = {slot: SlotState.from_saved(state) for slot, state in saved["slots"].items()}
        rejected = tuple(Rejected(**row) for row in saved["rejected"])
        return cls(**(dict(saved) | {"slots": slots, "rejected": rejected}))

    def of_slot(self, slot: int) -> SlotState:
        """Return the state of one slot; ValueError: the state has other slots, so this one would begin anew."""
        if not self.slots:
            return SlotState(next_index=slot)
        if slot not in self.slots:
            raise ValueError(
                f"the state has slots {sorted(self.slots)}, but not {slot}; merge the states of all ranks of a run "
                "with the same train.packs_per_step"
            )
        return self.slots[slot]


def merge_states(states: Sequence[LoaderState]) -> LoaderState:
    """Merge the states of all ranks after the same step (else ValueError), for any number of ranks."""
    slots: dict[int, SlotState] = {}
    for state in states:
        for slot, slot_state in state.slots.items():
            if slots.setdefault(slot, slot_state) != slot_state:
                raise ValueError(
                    f"slot {slot} has the states {slots[slot]} and {slot_state}; merge states of the same step"
                )
    rejected = {row.id: row for state in states for row in state.rejected}
    first = states[0] if states else LoaderState()  # ranks that do not write gather none
    skipped = tuple(map(min, zip(*(state.skipped for state in states if state.slots), strict=True)))
    return replace(first, slots=dict(sorted(slots.items())), rejected=tuple(rejected.values()), skipped=skipped)


def reasons_by_source(
    of_ranks: Iterable[tuple[Iterable[int], Mapping[str, Mapping[str, int]]]],
) -> dict[str, dict[str, int]]:
    """Add up rows skipped on all ranks by source and reason; of ranks with the same slots, the first's."""
    firsts: dict[tuple[int, ...], Mapping[str, Mapping[str, int]]] = {}
    for slots, reasons in of_ranks:
        firsts.setdefault(tuple(slots), reasons)
    total: dict[str, Counter[str]] = {}
    for of_slots in firsts.values():
        for source, counts in of_slots.items():
            total.setdefault(source, Counter()).update(counts)
    return {source: dict(sorted(counts.items())) for source, counts in sorted(total.items())}


def rejected_by_source(of_ranks: Iterable[Mapping[int, Mapping[str, int]]]) -> dict[str, int]:
    """Add up how many rows all ranks (each: slot -> source -> rows) have skipped, by source; a slot counts once."""
    of_slots = {slot: counts for of_rank in of_ranks for slot, counts in of_rank.items()}
    total: Counter[str] = Counter()
    for counts in of_slots.values():
        total.update(counts)
    return dict(sorted(total.items()))


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
        """Return which ranks hold the same samples, by their ranks among ``size`` that draw; None: none do."""
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
        """Yield this rank's steps, and send the steps of ranks that hold the same samples to these ranks."""
        others = [rank for rank, first in enumerate(self.firsts) if first == self.rank != rank]
        for step in steps:
            of_shares = {self.shares[rank].share for rank in others}
            parcels = {share: as_bytes(MadeStep((step.made[share],), step.slots, ())) for share in of_shares}
            self.swap([parcels[one.share] if rank in others else b"" for rank, one in enumerate(self.shares)])
            yield replace(step, made=(step.made[self.shares[self.rank].share],))
