"""Slots: the independent packers of a run, their states, and which ranks pack them.

A step has one pack per slot (``train.micro_batches`` of them), each from samples of its own. So what is in a step
follows from the recipe, however many ranks there are; they only divide the packs among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omnitrain.data.sample import Rejected
from omnitrain.errors import UserError


@dataclass(frozen=True)
class RankShare:
    """What one rank packs of every step: the packs of ``slots``, of each the ``share``-th of ``num_shares`` shares."""

    slots: tuple[int, ...]
    share: int = 0
    num_shares: int = 1


def share_of_rank(rank: int, ranks: int, slots: int) -> RankShare:
    """Divide a step among the ranks that draw data. Up to ``slots`` of them have whole packs, more share them.

    For example::

        4 slots, 2 ranks    rank 0: slots 0, 2             rank 1: slots 1, 3
        2 slots, 4 ranks    ranks 0, 2: halves of slot 0   ranks 1, 3: halves of slot 1

    Raises:
        UserError: ranks and slots that do not divide each other.
    """
    assert 0 <= rank < ranks
    if slots % ranks == 0:
        return RankShare(tuple(range(rank, slots, ranks)))
    if ranks % slots == 0:
        return RankShare((rank % slots,), share=rank // slots, num_shares=ranks // slots)
    raise UserError(
        f"train.micro_batches: found {slots} with {ranks} ranks that draw data; expected {_fitting(ranks)} "
        f"for {ranks} ranks; or change the number of ranks to {_fitting(slots)}"
    )


def _fitting(number: int) -> str:
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f"{', '.join(divisors)} or a multiple of {number}"


@dataclass(frozen=True)
class SlotState:
    """Where a slot stands: all that is needed to continue it.

    Attributes:
        next_index: global index of the first of its samples that was not drawn yet.
        held: indices of samples that were drawn and are in no pack yet, oldest first.
    """

    next_index: int
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class LoaderState:
    """Where the data of a run stand. Nothing in it depends on the number of ranks.

    Attributes:
        slots: slot -> its state. A loader's own has the slots of its rank, :func:`merge_states` puts them together.
            Empty: the beginning of a run.
        rejected: rows skipped so far, each once.
    """

    slots: Mapping[int, SlotState] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()

    def of_slot(self, slot: int) -> SlotState:
        """The state of one slot.

        Raises:
            ValueError: other slots were begun, but not this one: its samples would be drawn from the start.
        """
        if not self.slots:
            return SlotState(next_index=slot)
        if slot not in self.slots:
            raise ValueError(
                f"the state has slots {sorted(self.slots)} and not {slot}; merge the states of all ranks, "
                "of a run with the same train.micro_batches"
            )
        return self.slots[slot]


def merge_states(states: Sequence[LoaderState]) -> LoaderState:
    """The state of a run from those of its ranks after the same step; valid for any number of ranks.

    Raises:
        ValueError: ranks that share a slot and stand at different places in it.
    """
    slots: dict[int, SlotState] = {}
    for state in states:
        for slot, found in state.slots.items():
            if slots.setdefault(slot, found) != found:
                raise ValueError(f"slot {slot} stands at {slots[slot]} and at {found}; merge states of one step")
    rejected = {row.id: row for state in states for row in state.rejected}
    return LoaderState(dict(sorted(slots.items())), tuple(rejected.values()))
