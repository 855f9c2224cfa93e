"""End a stalled run with a report of the ranks that the others wait for; end all ranks if one fails.

Every rank notes its position. A background thread adds the number of notes to a counter in a store that all ranks
share. If the counter does not change within the limit, every thread stores its rank's position, one of them prints the
report, and each ends its process: no exception can reach a main thread that waits inside a C call.

A rank that leaves the loop with an error stores it, too. The others would otherwise only report consequences, such as
a closed connection, or wait in a collective until its timeout.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.errors import EXIT_FAILED, LostRankError, TrainingError, UserError
from omnitrain.ops.turns import running_thread
from omnitrain.parallel.watch.report import Collectives, Phase, Place, RankStatus, RunningAction, described, report
from omnitrain.torch_private import begun_collectives, process_groups, profiler_enabled, set_timeout, tree_leaves


def follow_components(model: Any, note: Callable[[str], object]) -> list[RemovableHandle]:
    """Call ``note(component)``, which must not wait, when the forward or the backward of a component begins.

    The hooks are on the largest modules with parameters of only one component, and on their direct children, because
    methods of a component may call the children one by one. Blocks get no hooks, because they may be compiled.
    """
    return [hook for module, name in component_modules(model) for hook in _follow(module, name, note)]


def component_modules(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that :func:`follow_components` follows, each with its component."""
    owners = {id(weight): name for name, weights in model.components.items() for weight in weights.values()}
    for path, name in _largest_modules(model, owners, ""):
        largest = model.get_submodule(path)
        for module in (largest, *largest.children()):
            if not isinstance(module, GradientCheckpointingLayer):
                yield module, name


def _largest_modules(module: nn.Module, owners: Mapping[int, str], path: str) -> Iterator[tuple[str, str]]:
    """Path and component of the largest modules that belong to one component."""
    names = {owners[id(weight)] for weight in module.parameters() if id(weight) in owners}
    if len(names) == 1 and path:
        yield path, names.pop()
    elif names:
        for child_name, child in module.named_children():
            yield from _largest_modules(child, owners, f"{path}.{child_name}" if path else child_name)


def _follow(module: nn.Module, name: str, note: Callable[[str], object]) -> Iterator[RemovableHandle]:
    def begin(*_: Any) -> None:  # a forward, or its backward
        note(name)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        if outputs:
            register_multi_grad_hook(outputs, begin, mode="any")

    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end)


_ANSWER_SECONDS = 5.0
_REPORT_SECONDS = 10.0
_PART_SECONDS = 1.0
_SEEN_SECONDS = 5.0
_POLL_SECONDS = 0.05


class StallBoard:
    """One rank's access to the shared store. Methods raise RuntimeError if the process that holds the store ended."""

    def __init__(self, store: dist.Store, name: str, rank: int, world: int) -> None:
        """``name`` must be the same on all ranks, and unused before."""
        self.rank = rank
        shared: Any = store  # torch's type stubs lack `clone`, and values that are bytes
        # Another connection, so that other callers cannot block it.
        self._store: Any = dist.PrefixStore(name, shared.clone())
        self._world = world
        self._last: Place | None = None

    def note(self, place: Place, moves: int) -> int:
        """Store this rank's position, in case the process dies; add ``moves`` and return the total of all ranks."""
        if place is not self._last:
            self._set(f"place/{self.rank}", place)
            self._last = place
        return int(self._store.add("moves", moves))

    def is_reported(self) -> bool:
        """Return whether a rank has detected a stall."""
        return self._store.check(["stalled"])

    def leave(self) -> None:
        """Note that this rank has left the loop."""
        self._store.set(f"left/{self.rank}", "")

    def tell(self, answer: RankStatus, seconds: float) -> str | None:
        """Store this rank's answer; the first caller waits for the other answers and returns the report."""
        self._set(f"answer/{self.rank}", answer)
        self._store.set("stalled", "")
        if not self.may_report():
            return None
        finished = {rank for rank in range(self._world) if self._has(f"left/{rank}")}
        running = [rank for rank in range(self._world) if rank not in finished]
        _wait(lambda: all(self._has(f"answer/{rank}") for rank in running), _ANSWER_SECONDS)
        found = {rank: self._get(f"answer/{rank}") for rank in running}
        answers = {rank: answer for rank, answer in found.items() if answer is not None}
        silent = {rank: self.last_place(rank) for rank, answer in found.items() if answer is None}
        return report(answers, silent, finished, seconds)

    def last_place(self, rank: int) -> Place | None:
        """Return the position that a rank stored last; None: it stored none."""
        place: Place | None = self._get(f"place/{rank}")
        return place

    def fail(self, message: str) -> bool:
        """Report that this rank has failed; return whether it is the first. Only the first message is stored."""
        if self._store.add("failures", 1) > 1:
            return False
        self._set("failed", (self.rank, message))
        return True

    def failure(self) -> tuple[int, str] | None:
        """Return the rank that failed first and its message; None: no rank has failed."""
        found: tuple[int, str] | None = self._get("failed")
        return found

    def first_failure(self) -> tuple[int, str] | None:
        """Like :meth:`failure`, for a rank that has failed: wait until the first one has stored its message."""
        _wait(lambda: self._has("failed"), _SEEN_SECONDS)
        return self.failure()

    def take_note(self, *, is_one_gone: bool = False) -> None:
        """Confirm that this rank has read the failure. Rank 0, which holds the store, waits for all confirmations.

        If one rank has ended, it waits only briefly, because a launcher that sees this will end rank 0, too.
        """
        self._store.add("noted", 1)
        if self.rank == 0:
            expected, seconds = (self._world - 1, _PART_SECONDS) if is_one_gone else (self._world, _SEEN_SECONDS)
            _wait(lambda: self._store.add("noted", 0) >= expected, seconds)

    def may_report(self) -> bool:
        """Return True on the first rank that calls it."""
        return self._store.add("reporters", 1) == 1

    def part(self, *, has_reported: bool) -> None:
        """Wait until the report is printed, because the end of one rank's process may end the others.

        Rank 0, which holds the store, returns last, so that the others print no connection errors.
        """
        if has_reported:
            self._store.set("reported", "")
        else:
            _wait(lambda: self._has("reported"), _REPORT_SECONDS)
        self._store.add("parted", 1)
        if self.rank == 0:
            answered = sum(self._has(f"answer/{rank}") for rank in range(self._world))
            _wait(lambda: self._store.add("parted", 0) >= answered, _PART_SECONDS)

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _get(self, key: str) -> Any:
        """What a rank of this run has set; None: nothing."""
        return pickle.loads(self._store.get(key)) if self._has(key) else None

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


_PATIENCE = timedelta(days=7)  # of collectives
_TICK_SECONDS = 1.0
_FIRST_STEP = 3.0  # times the limit, because the first step compiles kernels and starts data workers
_STACK_DEPTH = 20
_CLOSE_SECONDS = 2.0
_FLUSH_SECONDS = 1.0
_UNWIND_SECONDS = 3.0  # for a rank to leave the loop by itself after another one has failed
_IN_MICRO_BATCH = ("encode", "forward", "backward")


class StallMonitor:
    """End the run if no rank makes progress, and name the ranks that the others wait for, or the rank that failed.

    Any call of :meth:`at` on any rank is progress: a slow run is fine as long as some rank changes its position within
    the limit. Until the end of the first step the limit is three times as long.

    All ranks use it as a context manager around their steps, and call :meth:`follow` and :meth:`at` in it.

    From its start on, collectives of the existing process groups wait without a timeout: torch's timeouts, ten minutes
    on GPUs, would end the run before the limit, without naming a rank.

    An error that leaves the context on one rank ends all ranks within seconds. On the others the context raises
    :class:`TrainingError` with the first error instead of their own error; ranks that wait inside a collective end
    with exit code 1.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        limit_s: float | None,
        *,
        on_failure: Callable[[int], None] | None = None,
    ) -> None:
        """Create the monitor, on the main thread; it starts when the context is entered.

        It opens another connection to the ``store`` that all ranks share. ``limit_s``: seconds without progress on any
        rank before the run ends; None: no limit. ``on_failure``: called with this rank if it is the first one that
        fails.
        """
        monitors = store.add(f"omnitrain/watches/{rank}", 1)  # how many this rank has created: the same on all ranks
        self._board = StallBoard(store, f"omnitrain/stalls/{monitors}", rank, world)
        self._is_alone = world == 1
        self._limit_s = math.inf if limit_s is None else limit_s
        self._stream = sys.stderr
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
        action: RunningAction | None = None,
    ) -> None:
        """Set the position of this rank; a running profiler gets a mark with its description.

        Omitted arguments keep their value, with these exceptions: a new step resets micro-batch, phase, component and
        samples; a new micro-batch or action resets all but the step; a new phase resets component and action. Phases
        other than ``encode``, ``forward`` and ``backward`` belong to the step, and end its micro-batch.

        The arguments are those of :class:`Place`; ``samples`` is not copied.
        """
        last = self._place
        if step is not None:
            last = Place(step)
        elif micro_batch is not None or action is not None:
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
            last.action if action is None else action,
        )
        self._moves += 1
        if profiler_enabled():
            with record_function(described(self._place)):
                pass

    def follow(self, model: nn.Module) -> None:
        """Set the position to each component of an OmniModel when its forward or backward begins, until closed."""
        self._hooks += follow_components(model, lambda name: self.at(component=name))

    @contextmanager
    def paused(self, phase: Phase) -> Iterator[None]:
        """Suspend the limit, but not the watch for ended processes, for work of unknown length without positions."""
        self.at(phase=phase)
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._moves += 1

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; another training loop needs a new monitor."""
        return self._closing.is_set()

    def close(self) -> None:
        """Note that this rank has left the loop; the monitors of the other ranks continue."""
        self._closing.set()
        while self._hooks:
            self._hooks.pop().remove()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> StallMonitor:
        if not self._is_alone:
            for group in process_groups():
                set_timeout(group, _PATIENCE)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if isinstance(error, Exception | SystemExit) and not self._is_alone:  # Ctrl-C reaches all ranks
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Report ``error`` to the other ranks; if another rank failed first, raise its error instead."""
        if isinstance(error, LostRankError):
            error.args = (self._about_lost(error),)
        is_explained = isinstance(error, UserError | TrainingError)  # has a message for users, often on all ranks
        summary = "".join(traceback.format_exception_only(error)).strip()
        position = described(self._place)
        failure: tuple[int, str] | None = None
        with suppress(RuntimeError):  # the process that holds the store has ended
            message = str(error) if is_explained else f"rank {self._board.rank} failed in {position}: {summary}"
            is_first = self._board.fail(message)
            failure = self._board.first_failure()
            if is_first and self._on_failure is not None:
                self._on_failure(self._board.rank)
            self._board.take_note(is_one_gone=isinstance(error, LostRankError))
        if is_explained:
            return
        if failure is not None and failure[0] != self._board.rank:
            raise TrainingError(failure[1]) from error
        error.add_note(f"on rank {self._board.rank}, in {position}")

    def _about_lost(self, error: LostRankError) -> str:
        """Add the positions of the lost rank and of this one to a message."""
        seen = ""
        with suppress(RuntimeError):  # the lost rank held the store
            place = self._board.last_place(error.rank)
            seen = "" if place is None else f"; it was last seen in {described(place)}"
        return f"{error}{seen}; rank {self._board.rank} needed it in {described(self._place)}"

    def _watch(self) -> None:
        first_step: int | None = None
        reported, total, since = 0, 0, time.monotonic()
        while not self._closing.wait(min(_TICK_SECONDS, self._limit_s / 10)):
            now, moves, place = time.monotonic(), self._moves + self._paused, self._place
            if moves > reported:
                self._moved_at = now
            self._moves += self._paused
            try:
                counted, is_stalled = self._board.note(place, moves - reported), self._board.is_reported()
                failure = self._board.failure()
            except RuntimeError:  # the process that holds the store has ended: continue with this rank's moves
                counted, is_stalled, failure = moves, False, None
            if failure is not None and not self._closing.wait(_UNWIND_SECONDS):
                self._end_for_another(failure[1])
            if counted != total:
                total, since = counted, now
            first_step = place.step if first_step is None else first_step
            reported = moves
            limit = self._limit_s * (_FIRST_STEP if place.step == first_step else 1.0)
            if is_stalled or now - since > limit:
                self._end(now - since)
        with suppress(RuntimeError):
            self._board.leave()

    def _end_for_another(self, message: str) -> None:
        """End this process because another rank has failed."""
        with suppress(RuntimeError):
            if self._board.may_report():
                self._report(message)
            self._board.take_note()
        self._exit()

    def _end(self, seconds: float) -> None:
        """End this process because the run stalled, and report this rank's position."""
        threads = sys._current_frames()
        running = threads.get(running_thread() or self._main_thread, threads[self._main_thread])
        frames = traceback.extract_stack(running)[-_STACK_DEPTH:]
        stack = "".join(traceback.format_list(frames)).rstrip()
        answer = RankStatus(self._place, time.monotonic() - self._moved_at, _begun_collectives(), stack)
        try:
            text = self._board.tell(answer, seconds)
        except RuntimeError:  # the process that holds the store has ended
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
        # A thread that prints at this moment holds the lock of stdout, perhaps forever, so flush with a timeout.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        os._exit(EXIT_FAILED)


def _begun_collectives() -> dict[str, Collectives]:
    """The collectives started on each process group and device; torch counts them on the host."""
    return {
        f"{group.group_name}/{device}": Collectives(group.group_desc, count)
        for group in process_groups()
        for device, count in begun_collectives(group).items()
    }
