"""The packer of one slot: it draws samples, buffers them, and chooses packs from the buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic

from omnitrain.data.loading.order import SampleOrder
from omnitrain.data.loading.slots import SlotState
from omnitrain.data.packing.fill_pack import Held, fill_pack, num_tokens
from omnitrain.data.packing.sample import Rejected
from omnitrain.errors import DataError
from omnitrain.recipe import Data

_MAX_FAILURES = 1000  # consecutive rejected rows; since the order is shuffled, the others would fail as well


class SlotPacker(Generic[Held]):
    """Chooses the samples of a slot's packs, independently of all other slots."""

    def __init__(
        self,
        data: Data,
        order: SampleOrder,
        take: Callable[[], Held | Rejected],
        state: SlotState,
        alone: bool,
    ) -> None:
        """Continue at ``state``.

        Args:
            data: the recipe's ``data`` node.
            order: order of the samples over all slots of the run.
            take: returns the slot's next sample; samples that ``state`` holds come first.
            state: state of the slot.
            alone: make packs of one sample.
        """
        self._data, self._order, self._take, self._alone = data, order, take, alone
        self._next_index, self._num_unread = state.next_index, len(state.held)
        self._held: list[Held] = []
        self._held_tokens = 0
        self._failures = 0  # rows rejected since the last good one
        self._failed: set[tuple[int, int]] = set()  # source and row of each of them
        self._rejected: list[Rejected] = []  # since the last take_rejected()
        self._num_rejected = Counter(state.rejected)  # by source, each row once

    @property
    def state(self) -> SlotState:
        """The state after the last chosen pack."""
        held = tuple(sample.index for sample in self._held)
        return SlotState(self._next_index, held, dict(sorted(self._num_rejected.items())))

    def choose(self) -> list[Held]:
        """Return the samples of the next pack.

        Raises:
            UserError: the model cannot use the data, or a row is overlong and ``data.overlong`` is ``error``.
        """
        for _ in range(self._num_unread):
            self._draw()
        self._num_unread = 0
        while len(self._held) < self._data.packing_buffer or self._held_tokens < self._data.pack_tokens:
            self._draw()
        chosen = fill_pack(self._held, self._data.pack_tokens, alone=self._alone)
        self._held_tokens -= num_tokens(chosen)
        indices = {sample.index for sample in chosen}
        self._held = [sample for sample in self._held if sample.index not in indices]
        return chosen

    def take_rejected(self) -> list[Rejected]:
        """Return the rows rejected since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _draw(self) -> None:
        drawn = self._take()
        self._next_index = max(self._next_index, drawn.index + self._order.slots)
        if not isinstance(drawn, Rejected):
            self._held.append(drawn)
            self._held_tokens += len(drawn)
            self._failures = 0
            self._failed.clear()
            return
        if self._data.overlong == "error" and drawn.is_overlong:
            raise DataError(f"row {drawn.id!r}: {drawn.reason}; raise data.pack_tokens or set data.overlong: drop")
        self._rejected.append(drawn)
        if self._order.is_first(drawn.index):
            self._num_rejected[drawn.source] += 1
        self._failures += 1
        self._failed.add(self._order[drawn.index][1:])
        if self._failures >= _MAX_FAILURES or len(self._failed) == sum(self._order.lengths):
            raise DataError(f"all of {self._failures} rows were rejected; the last, {drawn.id!r}: {drawn.reason}")
