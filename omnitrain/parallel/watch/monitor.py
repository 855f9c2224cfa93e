"""A run that stands still ends, and says which rank is behind and where; where one rank fails, all end at once.

Every rank notes where it is. A thread beside it counts the notes in a store that all ranks share. When that count has
stood still for the set time, every thread tells in the store where its rank is, one of them prints the report, and
each ends its process: no exception reaches a main thread that waits inside a C call.

A rank that leaves the loop with an error tells that in the store, too. What others then meet, such as a connection that
was closed, is but the consequence; those that wait for a collective would do so until its timeout.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from omnitrain.errors import EXIT_FAILED, TrainingError, UserError
from omnitrain.parallel.watch.board import StallBoard
from omnitrain.parallel.watch.component_hooks import follow_components
from omnitrain.parallel.watch.report import Answer, Collectives, Phase, Place, described, report

_PATIENCE = timedelta(days=7)  # of collectives
_TICK_SECONDS = 1.0
_FIRST_STEP = 3.0  # times the limit: kernels are compiled, data workers start
_STACK_DEPTH = 20
_CLOSE_SECONDS = 2.0
_FLUSH_SECONDS = 1.0
_UNWIND_SECONDS = 3.0  # for a rank to leave the loop by itself, when another one has failed
_IN_MICRO_BATCH = ("encode", "forward", "backward")


class StallMonitor:
    """Ends the run when no rank moves on, and names the rank that the others wait for, or the one that failed.

    Moving on is any call of :meth:`at` on any rank: a run may be as slow as it likes as long as some rank comes to
    another place within the limit. Until the first step is done, the limit is three times as long.

    Used as a context, by all ranks alike::

        with Watch(store, rank, world, limit_s=600) as watch:
            watch.follow(model)
            for step in ...:
                watch.at(step=step, phase="data")
                for number, pack in enumerate(packs):
                    watch.at(micro_batch=number, phase="forward", samples=pack.info.ids)
                    ...
                    watch.at(phase="backward")
                    ...
                watch.at(phase="optimizer")
                ...
                with watch.paused("save"):
                    ...

    Inside and behind it, collectives of the process groups that there are wait without end: torch's own timeouts, of
    ten minutes on GPUs, would end the run before the limit is over, and name nobody.

    An error that leaves the context on one rank ends all within seconds. On the others the context raises
    :class:`TrainingError` with it in place of what they met; those that wait inside a collective end with exit code 1.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        limit_s: float | None,
        *,
        stream: TextIO | None = None,
        on_failure: Callable[[int], None] | None = None,
    ) -> None:
        """Nothing is watched before the context is entered.

        Args:
            store: shared by all ranks; it is used over a connection of its own.
            rank: of this process; its main thread is the calling one.
            world: number of ranks.
            limit_s: seconds without a move on any rank; None: they may stand still forever.
            stream: where the report goes; None: stderr.
            on_failure: called with this rank where it is the first one that fails.
        """
        number = store.add(f"omnitrain/watches/{rank}", 1)  # this rank's on this store: the same on all ranks
        self._board = StallBoard(store, f"omnitrain/stalls/{number}", rank, world)
        self._is_alone = world == 1
        self._limit_s = math.inf if limit_s is None else limit_s
        self._stream = stream or sys.stderr
        self._on_failure = on_failure
        self._main_thread = threading.get_ident()
        self._place, self._moves, self._paused = Place(), 0, False
        self._moved_at = time.monotonic()
        self._closing = threading.Event()
        self._hooks: list[RemovableHandle] = []
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def at(
        self,
        *,
        step: int | None = None,
        micro_batch: int | None = None,
        phase: Phase | None = None,
        component: str | None = None,
        samples: Sequence[str] | None = None,
    ) -> None:
        """This rank is at another place. A profiler, where one runs, gets a mark with its description.

        What is not given stays as it was, but what lies within something new is new: a step begins without a
        micro-batch, a micro-batch without samples, a phase without a component. Phases other than ``encode``,
        ``forward`` and ``backward`` are of the step, and end its micro-batch.

        Args:
            step: the optimizer step, from 1.
            micro_batch: of the step, from 0.
            phase: of the micro-batch or step.
            component: that runs now.
            samples: ids of the micro-batch; not copied.
        """
        last = self._place
        if step is not None:
            last = Place(step)
        elif micro_batch is not None:
            last = Place(last.step)
        elif phase is not None:
            within = phase in _IN_MICRO_BATCH
            last = Place(last.step, last.micro_batch, None, None, last.samples) if within else Place(last.step)
        self._place = Place(
            last.step,
            last.micro_batch if micro_batch is None else micro_batch,
            last.phase if phase is None else phase,
            last.component if component is None else component,
            last.samples if samples is None else samples,
        )
        self._moves += 1
        if torch.autograd._profiler_enabled():
            with record_function(described(self._place)):
                pass

    def follow(self, model: nn.Module) -> None:
        """Note every component of ``model`` when its forward or its backward begins, until this is closed.

        Args:
            model: an :class:`omnitrain.models.omni.model.OmniModel`.
        """
        self._hooks += follow_components(model, lambda name: self.at(component=name))

    @contextmanager
    def paused(self, phase: Phase) -> Iterator[None]:
        """For work of unknown length that notes no places, such as saving: no run is stalled as long as it lasts.

        A rank whose process dies in it is found all the same.
        """
        self.at(phase=phase)
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._moves += 1

    @property
    def is_closed(self) -> bool:
        """It was used, and is over: another loop needs another one."""
        return self._closing.is_set()

    def close(self) -> None:
        """This rank has left the loop; the others are watched on."""
        self._closing.set()
        while self._hooks:
            self._hooks.pop().remove()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> StallMonitor:
        if not self._is_alone:
            for group in _groups():
                dist.distributed_c10d._set_pg_timeout(_PATIENCE, group)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if isinstance(error, Exception | SystemExit) and not self._is_alone:  # Ctrl-C comes to all ranks
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tell the others of ``error``; raise what they told, where it was another rank that failed first."""
        is_told = isinstance(error, UserError | TrainingError)  # by a message, often of all ranks alike
        what = "".join(traceback.format_exception_only(error)).strip()
        where = described(self._place)
        failure: tuple[int, str] | None = None
        with suppress(RuntimeError):  # the store went with the process that held it
            message = str(error) if is_told else f"rank {self._board.rank} failed in {where}: {what}"
            is_first = self._board.fail(message)
            failure = self._board.first_failure()
            if is_first and self._on_failure is not None:
                self._on_failure(self._board.rank)
            self._board.take_note()
        if is_told:
            return
        if failure is not None and failure[0] != self._board.rank:
            raise TrainingError(failure[1]) from error
        error.add_note(f"on rank {self._board.rank}, in {where}")

    def _watch(self) -> None:
        first_step: int | None = None
        reported, total, since = 0, 0, time.monotonic()
        while not self._closing.wait(min(_TICK_SECONDS, self._limit_s / 10)):
            now, moves, place = time.monotonic(), self._moves + self._paused, self._place
            if moves > reported:
                self._moved_at = now
            self._moves += self._paused
            try:
                counted, told = self._board.note(place, moves - reported), self._board.somebody_told()
                failure = self._board.failure()
            except RuntimeError:  # the store went with the process that held it: see how far this rank comes alone
                counted, told, failure = moves, False, None
            if failure is not None and not self._closing.wait(_UNWIND_SECONDS):
                self._end_for_another(failure[1])
            if counted != total:
                total, since = counted, now
            first_step = place.step if first_step is None else first_step
            reported = moves
            limit = self._limit_s * (_FIRST_STEP if place.step == first_step else 1.0)
            if told or now - since > limit:
                self._end(now - since)
        with suppress(RuntimeError):
            self._board.leave()

    def _end_for_another(self, message: str) -> None:
        """End this process, for another rank has failed."""
        with suppress(RuntimeError):
            if self._board.may_report():
                self._report(message)
            self._board.take_note()
        self._exit()

    def _end(self, seconds: float) -> None:
        answer = self._answer()
        try:
            text = self._board.tell(answer, seconds)
        except RuntimeError:  # as above
            text = report({self._board.rank: answer}, {}, (), seconds)
        if text is not None:
            self._report(text)
        with suppress(RuntimeError):
            self._board.part(has_reported=text is not None)
        self._exit()

    def _report(self, text: str) -> None:
        self._stream.write(f"omnitrain: {text}\n")
        self._stream.flush()

    def _exit(self) -> None:
        # Whoever prints at this moment holds the lock of its stream, perhaps forever.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        os._exit(EXIT_FAILED)

    def _answer(self) -> Answer:
        frames = traceback.extract_stack(sys._current_frames()[self._main_thread])[-_STACK_DEPTH:]
        stack = "".join(traceback.format_list(frames)).rstrip()
        return Answer(self._place, time.monotonic() - self._moved_at, _begun_collectives(), stack)


def _groups() -> list[dist.ProcessGroup]:
    """Those that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


def _begun_collectives() -> dict[str, Collectives]:
    """Of each process group and device of this rank; torch counts them as they are issued, which asks no device."""
    begun = {}
    for group in _groups():
        for device in group._device_types:
            with suppress(RuntimeError):  # a backend that does not count
                backend: Any = group._get_backend(device)
                count = backend._get_sequence_number_for_group()
                begun[f"{group.group_name}/{device.type}"] = Collectives(group.group_desc, count)
    return begun
