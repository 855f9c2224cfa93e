"""Slots: the independent packers of a run, their states, and the ranks that run them.

A step has one pack per slot (``train.micro_batches`` slots), and each slot draws different samples. So the samples of a
step follow from the recipe alone, and the ranks only divide the packs among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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

    A rank that draws none (None) has no slots.

    For example::

        4 slots, 2 ranks    rank 0: slots 0, 2             rank 1: slots 1, 3
        2 slots, 4 ranks    ranks 0, 2: halves of slot 0   ranks 1, 3: halves of slot 1

    Raises:
        UserError: neither of ``ranks`` and ``slots`` divides the other.
    """
    if rank is None:
        return RankShare(())
    assert 0 <= rank < ranks
    if slots % ranks == 0:
        return RankShare(tuple(range(rank, slots, ranks)))
    if ranks % slots == 0:
        return RankShare((rank % slots,), share=rank // slots, num_shares=ranks // slots)
    raise UserError(
        f"train.micro_batches is {slots}, and {ranks} ranks draw data; set it to {_fitting(ranks)}, or change the "
        f"number of ranks that draw data to {_fitting(slots)}"
    )


def _fitting(number: int) -> str:
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f"{', '.join(divisors)} or a multiple of {number}"


@dataclass(frozen=True)
class SlotState:
    """The state of a slot, from which it resumes.

    Attributes:
        next_index: global index of its first sample that was not drawn yet.
        held: indices of samples that were drawn but not packed yet, oldest first.
    """

    next_index: int
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class LoaderState:
    """The state of a run's data. It does not depend on the number of ranks.

    Attributes:
        slots: slot -> its state. The state of one loader has the slots of its rank; :func:`merge_states` merges those
            of all ranks. Empty: the beginning of a run.
        rejected: rows skipped so far, each once.
    """

    slots: Mapping[int, SlotState] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()

    def of_slot(self, slot: int) -> SlotState:
        """Return the state of one slot.

        Raises:
            ValueError: the state has other slots but not this one, which would draw its samples from the start.
        """
        if not self.slots:
            return SlotState(next_index=slot)
        if slot not in self.slots:
            raise ValueError(
                f"the state has slots {sorted(self.slots)}, but not {slot}; merge the states of all ranks of a run "
                "with the same train.micro_batches"
            )
        return self.slots[slot]


def merge_states(states: Sequence[LoaderState]) -> LoaderState:
    """Merge the states of all ranks after the same step. The result is valid for any number of ranks.

    Raises:
        ValueError: ranks that share a slot have different states of it.
    """
    slots: dict[int, SlotState] = {}
    for state in states:
        for slot, slot_state in state.slots.items():
            if slots.setdefault(slot, slot_state) != slot_state:
                raise ValueError(
                    f"slot {slot} has the states {slots[slot]} and {slot_state}; merge states of the same step"
                )
    rejected = {row.id: row for state in states for row in state.rejected}
    return LoaderState(dict(sorted(slots.items())), tuple(rejected.values()))
