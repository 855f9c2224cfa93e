"""The packer of one slot: it draws samples, buffers them, and chooses packs from the buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar, cast

from omnitrain.data.loading.order import Draw, SampleOrder
from omnitrain.data.loading.slots import SlotState
from omnitrain.data.packing.budget import Held, PackBudget, fill_pack
from omnitrain.data.packing.sample import Rejected
from omnitrain.errors import DataError
from omnitrain.recipe import Data

_MAX_FAILURES = 1000  # consecutive rejected rows; since the order is shuffled, the others would fail as well

Prepared = TypeVar("Prepared", covariant=True)


class PreparedStreams(Protocol[Prepared]):
    """A stream of prepared rows for each slot."""

    def take(self, slot: int) -> Prepared | Rejected | None:
        """Return the next row of a slot; None if its draws have ended."""

    def redirect(self, slot: int, draws: Iterator[Draw]) -> None:
        """Go on with other draws of a slot."""


class SlotPacker(Generic[Held]):
    """Chooses the samples of a slot's packs, independently of all other slots."""

    def __init__(
        self,
        data: Data,
        order: SampleOrder,
        rows: PreparedStreams[Held],
        slot: int,
        state: SlotState,
        alone: bool,
        budget: PackBudget,
    ) -> None:
        """Continue at the ``state`` of a slot. ``rows`` of the slot begin with those that it holds."""
        self._data, self._order, self._slot = data, order, slot
        self._rows: PreparedStreams[Held] = rows
        self._alone, self._budget = alone, budget
        self._next_index, self._num_packs, self._begun = state.next_index, state.num_packs, state.begun
        self._num_unread, self._unread_pieces = len(state.held), state.held_pieces
        self._epochs = order.epochs((*state.held, state.next_index)[0], state.begun)  # of the rows that are taken
        self._epoch_of: dict[int, tuple[int, int]] = {}  # index of a held sample -> its source and epoch
        self._has_ended = False  # the order has no more rows
        self._held: list[Held] = []
        self._held_tokens = 0
        self._failures = 0  # rows rejected since the last good one
        self._failed: set[tuple[int, int]] = set()  # source and row of each of them
        self._rejected: list[Rejected] = []  # since the last take_rejected()
        self._num_rejected = Counter(state.rejected)  # by source, each row once
        self._fatal = {order.draw(row.index, state.begun)[1:]: row for row in state.fatal}  # by source and row

    @property
    def state(self) -> SlotState:
        """The state after the last chosen pack."""
        pieces: dict[int, tuple[int, ...]] = {}
        for sample in self._held:
            if sample.num_pieces > 1:
                pieces[sample.index] = (*pieces.get(sample.index, ()), sample.piece)
        return SlotState(
            next_index=self._next_index,
            held=tuple(dict.fromkeys(one.index for one in self._held)),
            rejected=dict(sorted(self._num_rejected.items())),
            held_pieces=pieces,
            num_packs=self._num_packs,
            begun=self._begun,
            fatal=tuple(self._fatal.values()),
        )

    def choose(self) -> list[Held]:
        """Return the samples of the next pack; UserError: an unusable row, or all epochs have ended."""
        for _ in range(self._num_unread):
            self._draw()
        self._num_unread, self._unread_pieces = 0, {}
        self._begin_stage()
        while not self._has_ended and (
            len(self._held) < self._data.packing_buffer or self._held_tokens < self._budget.tokens
        ):
            self._draw()
        if not self._held:
            raise DataError(self._why_ended())
        chosen = fill_pack(self._of_first_epochs(), self._budget, alone=self._alone)
        self._num_packs += 1
        self._held_tokens -= sum(map(len, chosen))
        taken = {(sample.index, sample.piece) for sample in chosen}
        self._held = [sample for sample in self._held if (sample.index, sample.piece) not in taken]
        self._epoch_of = {sample.index: self._epoch_of[sample.index] for sample in self._held}
        return chosen

    def _of_first_epochs(self) -> list[Held]:
        """Return the held samples that may be packed: an epoch of a source waits until the one before it is packed."""
        if self._order.mixes_epochs:
            return self._held
        first: dict[int, int] = {}  # source -> epoch of its oldest sample
        places = ((sample, *self._epoch_of[sample.index]) for sample in self._held)
        return [sample for sample, source, epoch in places if first.setdefault(source, epoch) == epoch]

    def _why_ended(self) -> str:
        drawn = "data.train: all rows have been drawn as often as the `epochs` of their data sets allow"
        if not self._num_packs:
            step = f"the first step, which has {self._order.slots} packs (train.packs_per_step)"
            return f"{drawn}, but they are too few for {step}; raise `epochs`, or add rows"
        return f"{drawn}, after {self._num_packs} steps; set train.steps={self._num_packs}, or raise `epochs`"

    def _begin_stage(self) -> None:
        """Draw with the weights of the stage of the next step, from the first index that was not drawn."""
        if (stage := self._order.stage_of(self._num_packs)) > len(self._begun):
            self._begun += (self._next_index,) * (stage - len(self._begun))
            self._rows.redirect(self._slot, self._order.draws(self._next_index, self._begun))
            self._epochs = self._order.epochs(self._next_index, self._begun)
            self._has_ended = False

    def take_rejected(self) -> list[Rejected]:
        """Return the rows rejected since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _draw(self) -> None:
        drawn = self._rows.take(self._slot)
        if drawn is None:
            self._has_ended = True
            return
        self._next_index = max(self._next_index, drawn.index + self._order.slots)
        if not isinstance(drawn, Rejected):
            pieces = cast(Sequence[Held], drawn.pieces)  # of its own kind
            wanted = self._unread_pieces.get(drawn.index, range(len(pieces)))
            self._held += [pieces[piece] for piece in wanted]
            self._epoch_of[drawn.index] = next((s, e) for index, s, e in self._epochs if index == drawn.index)
            self._held_tokens += sum(len(pieces[piece]) for piece in wanted)
            self._failures = 0
            self._failed.clear()
            return
        self._rejected.append(drawn)
        place = self._order.draw(drawn.index, self._begun)[1:]
        is_new = self._order.is_first(drawn.index, self._begun)
        if drawn.is_fatal:  # in an earlier epoch it may have been ready in time
            is_new = place not in self._fatal
            self._fatal.setdefault(place, drawn)
        if is_new:
            self._num_rejected[drawn.source] += 1
        self._failures += 1
        self._failed.add(place)
        if self._failures >= _MAX_FAILURES or len(self._failed) == sum(self._order.lengths):
            raise DataError(f"all of {self._failures} rows were rejected; the last, {drawn.id!r}: {drawn.reason}")
