"""Prepare data rows in processes of their own. A row that misses its deadline ends its process, which starts anew.

A decoder that hangs in C code cannot be interrupted by Python. So the kernel ends the process: no signal handler is
set for the timer that runs while a row is prepared. A decoder that crashes costs its row, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import chain, islice
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from omnitrain.data.loading.data_process import encode, follow_main_process, receive, send
from omnitrain.data.loading.order import Draw
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor, sample_within
from omnitrain.data.sources.rows import Row, RowSource
from omnitrain.errors import DataError, TrainingError, UserError
from omnitrain.recipe.data import Overlong

Prepared = Sample | Rejected | UserError


class PreparedRows:
    """Prepares data rows, in any process; a UserError is returned, since it may have to travel to another process."""

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        budget: PackBudget | None = None,
        cached: int = 0,
        without_tails: bool = False,
        overlong: Sequence[Overlong] | None = None,
        may_ask: bool = False,
        dropped: Callable[[int], frozenset[str]] | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare the rows of ``sources``; each process keeps ``cached`` samples.

        ``overlong``: of each data set; ``dropped``: what the condition of an index's sample loses; ``seed``: of the
        run. Further arguments: see :func:`~omnitrain.data.render.processor.sample_within`.
        """
        self.sources, self.processor, self.budget, self.cached = sources, processor, budget, cached
        self.overlong = overlong or ["drop"] * len(sources)
        self._options = {"without_tail": without_tails, "may_ask": may_ask}
        self._dropped, self._seed = dropped, seed
        self.on_read: Callable[[Row], None] | None = None  # called with each row that is read, before its media are

    def seconds(self, source: int) -> float | None:
        """Return the deadline of each row of a source, in seconds; None: it has none."""
        return getattr(self.sources[source], "sample_seconds", None)  # a plain sequence of rows has none

    @property
    def may_hang(self) -> bool:
        """Whether any source has a deadline, and media that may miss it."""
        return any(
            self.seconds(number) is not None and getattr(source, "shown", True)
            for number, source in enumerate(self.sources)
        )

    def __getitem__(self, draw: Draw) -> Prepared:
        index, source, row = draw
        try:
            prepared = self._prepared(source, row, self._dropped(index) if self._dropped else frozenset())
        except UserError as error:
            return error
        if isinstance(prepared, Rejected):
            return dataclasses.replace(prepared, index=index)
        more = tuple(dataclasses.replace(piece, index=index, seed=self._seed) for piece in prepared.more)
        return dataclasses.replace(prepared, index=index, seed=self._seed, more=more)

    @functools.cached_property  # built at the first use, because a cache cannot be pickled to another process
    def _prepared(self) -> Any:
        return functools.lru_cache(maxsize=self.cached)(self._prepare)

    def _prepare(self, source: int, row: int, dropped: frozenset[str]) -> Sample | Rejected:
        overlong, data_row = self.overlong[source], self.sources[source][row]
        if self.on_read is not None:
            self.on_read(data_row)
        prepared = sample_within(self.processor, data_row, self.budget, overlong, dropped=dropped, **self._options)
        if overlong == "error" and isinstance(prepared, Rejected) and prepared.is_overlong:
            raise DataError(
                f"row {prepared.id!r}: {prepared.reason}; raise the limit, or set `overlong` to `drop` or `split`"
            )
        return prepared


_MESSAGE_SECONDS = 0.01  # rows that are prepared within this time travel together
_NAME_CHARACTERS = 1000  # of the id and the source of a row that missed its deadline
_CURRENT_BYTES = 1 << 15  # two names, in which a character takes up to 12 bytes
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


class _Failed(NamedTuple):
    """An error in place of a row that is neither a mistake of the user nor a row that costs itself alone."""

    trace: str


class _RowBatch:
    """Rows that were requested together, in order; those that have not arrived are None."""

    def __init__(self, rows: Sequence[Draw | Rejected]) -> None:
        self.rows: list[Any] = [row if isinstance(row, Rejected) else None for row in rows]
        self.num_missing = self.rows.count(None)

    def put(self, place: int, row: Prepared) -> None:
        self.rows[place] = row
        self.num_missing -= 1


class _Request(NamedTuple):
    draw: Draw
    batch: _RowBatch
    place: int  # in the batch


class _RowProcess:
    """One process, and the requests that it has not answered yet."""

    def __init__(self, rows: PreparedRows) -> None:
        self._rows = rows
        self.unanswered: deque[_Request] = deque()
        # The index of the row that it prepares, with its id and source once they are known.
        self._current = multiprocessing.RawArray("c", _CURRENT_BYTES)
        self._start()

    def _start(self) -> None:
        self.connection, theirs = socket.socketpair()
        arguments = (self._rows, theirs, self._current)
        self._process = multiprocessing.Process(target=_serve, args=arguments, name="rows", daemon=True)
        self._process.start()
        theirs.close()
        if self.unanswered:
            self._send(list(self.unanswered))

    def request(self, requests: list[_Request]) -> None:
        """Ask for rows."""
        self.unanswered += requests
        self._send(requests)

    def _send(self, requests: list[_Request]) -> None:
        with contextlib.suppress(ConnectionError):  # the process has ended, which `receive` finds
            send(self.connection, encode([request.draw for request in requests]))

    def receive(self) -> None:
        """Receive some rows, or find that a row ended the process; errors as of :meth:`RowProcesses.prepare`."""
        try:
            rows = receive(self.connection)
        except (EOFError, ConnectionError):
            self._reject_current_row()
            return
        for row in rows:
            if isinstance(row, _Failed):
                raise TrainingError(f"in a process that prepares rows:\n{row.trace}")
            request = self.unanswered.popleft()
            request.batch.put(request.place, row)

    def _reject_current_row(self) -> None:
        """Reject the row over which the process ended, and start it anew for the others."""
        self.end()
        code = self._process.exitcode or 0
        index, *names = json.loads(self._current.value or "[null]")
        current = next((request.draw for request in self.unanswered if request.draw[0] == index), None)
        if current is None or -code not in (signal.SIGALRM, *_CRASHES):
            raise TrainingError(f"a process that prepares rows ended with exit code {code} (out of memory?)")
        _, source, row = current
        if -code == signal.SIGALRM:
            reason = f"not ready within {self._rows.seconds(source):g} s (sample_seconds)"
        else:
            reason = f"its decoder crashed ({signal.Signals(-code).name})"
        name = getattr(self._rows.sources[source], "name", str(source))
        id_, of_source = names or (f"{name}[{row}]", name)
        same = [request for request in self.unanswered if request.draw[1:] == (source, row)]  # also of later epochs
        for request in same:
            self.unanswered.remove(request)
            request.batch.put(request.place, Rejected(id_, of_source, reason, request.draw[0], is_fatal=True))
        self._start()

    def end(self) -> None:
        """End the process, if it has not ended."""
        self.connection.close()
        if self._process.exitcode is None and not wait([self._process.sentinel], timeout=0):
            self._process.kill()
        self._process.join()


class RowProcesses:
    """Prepares rows in several processes. Use it in a ``with`` block, which ends them."""

    def __init__(self, rows: PreparedRows, number: int, ahead: int) -> None:
        """Start ``number`` processes that prepare ``rows``, up to ``ahead`` batches each ahead of the consumer."""
        self._most = number * ahead
        self._processes: list[_RowProcess] = []
        # Also at exit, where multiprocessing would otherwise wait for processes that wait for requests.
        self._end = Finalize(
            None, lambda processes: [one.end() for one in processes], (self._processes,), exitpriority=0
        )
        for _ in range(number):
            self._processes.append(_RowProcess(rows))

    def prepare(self, requests: Iterator[Sequence[Draw | Rejected]]) -> Generator[list[Prepared], None, None]:
        """Yield batches of prepared rows in order; TrainingError: a process was killed, or a row failed."""
        ahead: deque[_RowBatch] = deque()
        while True:
            while len(ahead) < self._most and (rows := next(requests, None)) is not None:
                ahead.append(batch := _RowBatch(rows))
                asked = [_Request(row, batch, i) for i, row in enumerate(rows) if not isinstance(row, Rejected)]
                if asked:
                    min(self._processes, key=lambda process: len(process.unanswered)).request(asked)
            if not ahead:
                return
            while ahead[0].num_missing:
                busy: dict[Any, _RowProcess] = {one.connection: one for one in self._processes if one.unanswered}
                for connection in wait(list(busy)):
                    busy[connection].receive()
            yield ahead.popleft().rows

    def __enter__(self) -> RowProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def prepare_some(rows: PreparedRows, draws: Sequence[Draw]) -> list[Prepared]:
    """Prepare a few rows within their deadlines, without a loader."""
    if not rows.may_hang:
        return [rows[draw] for draw in draws]
    with RowProcesses(rows, number=1, ahead=1) as processes:
        return list(chain.from_iterable(processes.prepare(iter([draws]))))


def _serve(rows: PreparedRows, connection: socket.socket, current: Any) -> None:
    follow_main_process()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends this process
    index, source = 0, 0

    def begin(row: Row) -> None:
        """Begin the time of a row once it has been read: a stream may have to skip others first."""
        current.value = json.dumps([index, row.id[:_NAME_CHARACTERS], row.source[:_NAME_CHARACTERS]]).encode()
        signal.setitimer(signal.ITIMER_REAL, rows.seconds(source) or 0.0)

    rows.on_read = begin
    while True:
        try:
            draws = receive(connection)
        except (EOFError, ConnectionError):
            return
        ready: list[Prepared | _Failed] = []
        sent_at = time.monotonic()
        for draw in draws:
            index, source, _ = draw
            current.value = json.dumps([index]).encode()
            try:
                ready.append(rows[draw])
            except Exception:  # the process that asked must get it, not only this one's stderr
                ready.append(_Failed(traceback.format_exc()))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            if time.monotonic() - sent_at > _MESSAGE_SECONDS:
                send(connection, encode(ready))
                ready, sent_at = [], time.monotonic()
        if ready:
            send(connection, encode(ready))


_ROWS_PER_MESSAGE = 8  # rows that a helper is asked for at a time
_MESSAGES_AHEAD = 4  # most messages that a helper prepares ahead; few, because rows with video are large

Fatal = Mapping[tuple[int, int], Rejected]  # source and row -> why


class SlotRows:
    """A stream of prepared rows per slot, in the order of its draws and independent of other slots.

    With helpers, rows are requested ahead, always for the slot with the fewest rows ahead; else a row is prepared when
    it is taken. A row that missed its deadline once, or crashed a decoder, is rejected whenever the slot draws it. Use
    it in a ``with`` block, which ends the helpers.
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
        """Prepare ``rows`` for the ``draws`` of each slot; ``fatal``: rows of each slot that ended a process before."""
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
        """Return a slot's next row; None: the end; UserError: it is unusable; TrainingError: a helper was killed."""
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
