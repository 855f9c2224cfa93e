"""Prepared rows for each slot, made by this process or by helpers ahead of their use."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from itertools import islice

from omnitrain.data.loading.order import Draw
from omnitrain.data.loading.prepared_rows import Prepared, PreparedRows
from omnitrain.data.loading.row_processes import RowProcesses
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.errors import UserError

_ROWS_PER_MESSAGE = 8  # rows that a helper is asked for at a time
_MESSAGES_AHEAD = 4  # most messages that a helper prepares ahead; few, because rows with video are large

Fatal = Mapping[tuple[int, int], Rejected]  # source and row -> why


class SlotRows:
    """A stream of prepared rows per slot, in the order of its draws and independent of other slots.

    Without helpers a row is prepared when it is taken. With helpers, rows are requested ahead, always for the slot with
    the fewest rows ahead, so the number of waiting rows stays bounded.

    A row that missed its deadline once, or crashed a decoder, is rejected whenever the slot draws it, even if it would
    be ready in time now. Use it in a ``with`` block, which ends the helpers.
    """

    def __init__(
        self,
        rows: PreparedRows,
        draws: Mapping[int, Iterator[Draw]],
        helpers: int,
        *,
        is_ahead: bool = True,
        fatal: Mapping[int, Fatal] | None = None,
    ) -> None:
        """Prepare ``rows`` for the ``draws`` of each slot, with a number of ``helpers``, perhaps ahead of their use.

        ``fatal``: slot -> the rows that missed their deadline, or crashed a decoder, before.
        """
        self._rows, self._draws, self._helpers, self._is_ahead = rows, dict(draws), helpers, is_ahead and helpers > 0
        self._fatal = {slot: dict((fatal or {}).get(slot, {})) for slot in draws}
        self._ready: dict[int, deque[tuple[Draw, Prepared]]] = {slot: deque() for slot in draws}
        self._ahead = dict.fromkeys(draws, 0)  # rows requested and not taken yet
        self._batch_size = _ROWS_PER_MESSAGE if self._is_ahead else 1
        self._ended: set[int] = set()  # slots whose draws have all been requested
        self._arrived: set[int] = set()  # slots whose last rows have arrived
        # Slot, all its draws, and the draws of each batch that is to come.
        self._requested: deque[tuple[int, Iterator[Draw], list[Draw]]] = deque()
        self._batches = self._prepare()

    def take(self, slot: int) -> Sample | Rejected | None:
        """Return the next row of a slot; None if its draws have ended.

        Raises:
            UserError: the model cannot use the row.
            TrainingError: a helper was killed.
        """
        self._ahead[slot] -= 1  # must come first: without rows ahead the batch is requested in `next` below
        while not self._ready[slot]:
            if slot in self._arrived:
                return None
            batch = next(self._batches)
            owner, draws, requested = self._requested.popleft()
            if draws is self._draws[owner]:  # else the slot was redirected since
                self._ready[owner].extend(zip(requested, batch, strict=True))
                if len(batch) < self._batch_size:
                    self._arrived.add(owner)
        (index, *place), row = self._ready[slot].popleft()
        if isinstance(row, UserError):
            raise row
        fatal, key = self._fatal[slot], (place[0], place[1])
        if isinstance(row, Rejected) and row.is_fatal:
            fatal.setdefault(key, row)
        return dataclasses.replace(fatal[key], index=index) if key in fatal else row

    def redirect(self, slot: int, draws: Iterator[Draw]) -> None:
        """Go on with other draws of a slot. Its rows that wait are dropped."""
        self._draws[slot] = draws
        self._ready[slot].clear()
        self._ahead[slot] = 0
        self._ended.discard(slot)
        self._arrived.discard(slot)

    def __enter__(self) -> SlotRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def _requests(self) -> Iterator[list[Draw | Rejected]]:
        while True:
            slot = min(self._ahead, key=lambda one: (one in self._ended, self._ahead[one]))
            batch = list(islice(self._draws[slot], self._batch_size))
            if len(batch) < self._batch_size:
                self._ended.add(slot)
            self._ahead[slot] += self._batch_size
            self._requested.append((slot, self._draws[slot], batch))
            yield [self._fatal[slot].get(draw[1:], draw) for draw in batch]

    def _prepare(self) -> Generator[list[Prepared], None, None]:
        """Yield batches of prepared rows, in the order of the requests."""
        if self._helpers:
            with RowProcesses(self._rows, self._helpers, ahead=_MESSAGES_AHEAD if self._is_ahead else 1) as processes:
                yield from processes.prepare(self._requests())
        else:
            for batch in self._requests():
                yield [row if isinstance(row, Rejected) else self._rows[row] for row in batch]
