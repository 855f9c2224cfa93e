"""A pool of warm ranks: gloo processes on this machine that together run one function after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.notebook import lines_of_cells, main_without_file, pickled
from omnitrain.parallel.spawn.worker import Case, PoolMessage, receive, send, serve


class RankError(RuntimeError):
    """A function failed on ``ranks``, the first to fail first. The message lists ranks, errors and stacks.

    ``__cause__`` is the exception of that rank, if it can be pickled; ``tracebacks`` and, of :func:`launch`, ``output``
    are by rank.
    """

    def __init__(self, message: str, ranks: Sequence[int], tracebacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.tracebacks = dict(tracebacks or {})
        self.output: tuple[str, ...] = ()


def failure(name: str, timeout_s: float, reports: Mapping[int, PoolMessage]) -> RankError | None:
    """Return the error that describes all failures of the function ``name``; None if every rank returned."""
    of_kind: dict[str, dict[int, PoolMessage]] = {"died": {}, "failed": {}, "late": {}, "done": {}}
    for rank, report in sorted(reports.items()):
        of_kind[report.kind][rank] = report
    died, late, done = of_kind["died"], of_kind["late"], of_kind["done"]
    failed = dict(sorted(((rank, report.value) for rank, report in of_kind["failed"].items()), key=lambda i: i[1].at))
    ranks = [*died, *failed, *late]
    if not ranks:
        return None
    end = "was still running" if died or failed else f"did not return within {timeout_s:g} s"
    lines = [f"{name} failed on {len(ranks)} of {len(reports)} ranks"]
    lines += [f"  rank {rank} died with exit code {report.value}" for rank, report in died.items()]
    lines += [f"  rank {rank} raised {error.summary}" for rank, error in failed.items()]
    lines += [f"  rank {rank} {end}" for rank in late]
    lines += [f"  rank {rank} returned" for rank in done]
    if failed and not died:  # if a rank died, the errors of the others are only consequences
        first = next(iter(failed))
        lines += [f"rank {first} raised:", failed[first].traceback]
    lines += _stacks(late)
    error = RankError("\n".join(lines), ranks, {rank: raised.traceback for rank, raised in failed.items()})
    if ranks[0] in failed and failed[ranks[0]].error is not None:
        error.__cause__ = pickle.loads(failed[ranks[0]].error)
    return error


def _stacks(late: Mapping[int, PoolMessage]) -> list[str]:
    """The stacks of the ranks that are late; ranks with the same stack are grouped."""
    ranks_at: dict[str | None, list[int]] = {}
    for rank, report in late.items():
        ranks_at.setdefault(report.value, []).append(rank)
    lines = []
    for stack, ranks in ranks_at.items():
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines += [f"{names} did not report a stack" if stack is None else f"{names} last seen at:\n{stack}"]
    return lines


__all__ = ["RankError", "RankPool"]

_START_SECONDS = 300.0
_GRACE_SECONDS = 0.5  # wait after the first failure for independent failures of other ranks
_ANSWER_SECONDS = 2.0  # for a rank to report its stack
_CLEAN_UP_SECONDS = 10.0
_DEATH_SECONDS = 5.0  # for the exit code of a process that closed its connection
_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


class RankPool:
    """Processes on this machine that stay ready, one per rank, each with one thread.

    Starting a rank takes seconds of imports; running a function on warm ranks takes milliseconds. Every call gets new
    process groups (backend gloo) and seed 0. Other changes that a function makes to its process remain. A call that
    fails replaces all its ranks. No rank outlives this process. On Linux ``preload`` is imported once for all ranks,
    which start when first needed; the first user of the fork server decides.
    """

    def __init__(self, nproc: int, *, preload: Sequence[str] = ()) -> None:
        self.nproc = nproc
        self.num_starts = self.num_calls = 0
        self.start_seconds = self.call_seconds = 0.0
        self._context: Any = multiprocessing.get_context(_START_METHOD)
        if _START_METHOD == "forkserver":
            self._context.set_forkserver_preload(["omnitrain.parallel.spawn.worker", *preload])
        self._ranks: dict[int, _Worker] = {}
        self._number = 0  # of the running case
        self._on_print: Callable[[int, str], None] | None = None

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout_s: float,
        world: int | None = None,
        on_print: Callable[[int, str], None] | None = None,
    ) -> list[Any]:
        """Return the results of ``function(*args)`` on ranks 0 .. world - 1, with ``torch.distributed`` initialised.

        Arguments as of :func:`~omnitrain.parallel.spawn.launch.launch`. ``timeout_s`` is without the start of the
        ranks; ``world`` None: all; ``on_print`` gets each rank and the whole lines that it prints, and gives the ranks
        the environment of a launcher. Raises UserError, also for too few ranks, and RankError as ``launch`` does.
        """
        world = self.nproc if world is None else world
        if not 1 <= world <= self.nproc:
            raise UserError(f"found {world} ranks; this pool can run 1 to {self.nproc}")
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        try:
            call = pickled((function, args))
        except Exception as error:  # pickling can raise any type
            raise UserError(
                f"{name} cannot be sent to other processes ({error}); expected a function at the top level of a module "
                "or 'module:function', and picklable arguments"
            ) from error
        self._start(world)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="omnitrain-ranks-") as folder, self._discarding_on_error(world):
            cells = None if on_print is None else lines_of_cells()
            self._number += 1
            self._on_print = on_print
            reports = self._reports(Case(call, world, str(Path(folder, "store")), timeout_s, cells))
            if (failed := failure(name, timeout_s, reports)) is not None:
                raise failed
            self._clean_up(world)
        self.num_calls += 1
        self.call_seconds += time.monotonic() - began
        return [pickle.loads(report.value) for _, report in sorted(reports.items())]

    def close(self) -> None:
        """End all ranks; a later call starts new ones."""
        for rank in list(self._ranks):
            self._discard(rank)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, world: int) -> None:
        began = time.monotonic()
        missing = [rank for rank in range(world) if rank not in self._ranks or not self._ranks[rank].is_alive()]
        for rank in missing:
            self._discard(rank)
            self._ranks[rank] = _Worker(self._context, rank)
        for rank in missing:
            self._await_ready(rank)
        self.num_starts += len(missing)
        self.start_seconds += time.monotonic() - began

    def _await_ready(self, rank: int) -> None:
        worker = self._ranks[rank]
        try:
            ready = worker.connection.poll(_START_SECONDS) and receive(worker.connection)
        except (EOFError, OSError):
            ready = False
        if not ready:
            code = worker.exit_code()
            self.close()
            ended = f"timed out after {_START_SECONDS:g} s" if code is None else f"ended with exit code {code}"
            hint = "in a script, put the code that starts ranks under `if __name__ == '__main__':`"
            raise RankError(f"rank {rank} {ended} during its start; {hint}", [rank])

    def _discard(self, rank: int) -> None:
        worker = self._ranks.pop(rank, None)
        if worker is not None:
            worker.kill()

    @contextlib.contextmanager
    def _discarding_on_error(self, world: int) -> Iterator[None]:
        """Kill the ranks of a failed case; they, or their peers, may still be running it."""
        try:
            yield
        except BaseException:
            for rank in range(world):
                self._discard(rank)
            raise

    def _reports(self, case: Case) -> dict[int, PoolMessage]:
        """Rank -> the result of the case; kills the ranks that do not report in time."""
        deadline = time.monotonic() + case.timeout_s
        reports = self._tell(range(case.world), PoolMessage("run", self._number, case))
        while len(reports) < case.world:
            if any(report.kind != "done" for report in reports.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            running = [rank for rank in range(case.world) if rank not in reports]
            received = self._receive(running, ("done", "failed"), deadline)
            if not received:
                return reports | self._stop_late(running)
            reports |= received
        return reports

    def _tell(self, ranks: Iterable[int], message: PoolMessage) -> dict[int, PoolMessage]:
        """Send a message; return the ranks that have died."""
        return {rank: self._discard_dead(rank) for rank in ranks if not self._ranks[rank].send(message)}

    def _receive(self, ranks: Sequence[int], kinds: tuple[str, ...], deadline: float) -> dict[int, PoolMessage]:
        """Rank -> its next message of these kinds, or that it died; empty if the deadline passes first."""
        by_connection = {self._ranks[rank].connection: rank for rank in ranks}
        received: dict[int, PoolMessage] = {}
        while not received:
            ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = by_connection[connection]
                try:
                    message = receive(self._ranks[rank].connection)
                except (EOFError, OSError):
                    received[rank] = self._discard_dead(rank)
                    continue
                if message.number == self._number and message.kind == "printed" and self._on_print is not None:
                    self._on_print(rank, message.value)
                if message.number == self._number and message.kind in kinds:
                    received[rank] = message
        return received

    def _discard_dead(self, rank: int) -> PoolMessage:
        dead = PoolMessage("died", self._number, self._ranks[rank].exit_code())
        self._discard(rank)
        return dead

    def _stop_late(self, running: Sequence[int]) -> dict[int, PoolMessage]:
        """Ask the ranks that are late for their stacks, then kill them."""
        reports = self._tell(running, PoolMessage("where", self._number))
        deadline = time.monotonic() + _ANSWER_SECONDS
        while silent := [rank for rank in running if rank not in reports]:
            reports |= self._receive(silent, ("late",), deadline) or dict.fromkeys(silent, PoolMessage("late"))
        for rank in running:
            self._discard(rank)
        return reports

    def _clean_up(self, world: int) -> None:
        """Let the ranks clean up together; kill those that do not finish in time."""
        waiting = list(range(world))
        for rank in self._tell(waiting, PoolMessage("clean", self._number)):
            waiting.remove(rank)
        deadline = time.monotonic() + _CLEAN_UP_SECONDS
        while waiting and (received := self._receive(waiting, ("clean",), deadline)):
            waiting = [rank for rank in waiting if rank not in received]
        for rank in waiting:
            self._discard(rank)


class _Worker:
    """The pool's handle of one rank's process."""

    def __init__(self, context: Any, rank: int) -> None:
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=serve, args=(theirs, rank), name=f"rank {rank}")
        with main_without_file():
            self._process.start()
        theirs.close()
        # Also at exit, where multiprocessing would wait forever for processes that wait for their next case.
        self.kill = Finalize(self, _kill, args=(self._process, self.connection), exitpriority=0)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, message: PoolMessage) -> bool:
        """Send a message; False if the process has ended."""
        try:
            send(self.connection, message)
        except OSError:
            return False
        return True

    def exit_code(self) -> int | None:
        self._process.join(_DEATH_SECONDS)
        return self._process.exitcode


def _kill(process: BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()
