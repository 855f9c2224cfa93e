"""A pool of warm ranks: gloo processes on this machine that run one function after the other together."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.errors import Died, Late, RankError, Report, failure
from omnitrain.parallel.spawn.notebook import main_without_file, pickled
from omnitrain.parallel.spawn.worker import (
    Case,
    Clean,
    Done,
    Failed,
    Finish,
    Message,
    Stack,
    Where,
    receive,
    send,
    serve,
)

__all__ = ["RankError", "RankPool"]

_START_SECONDS = 300.0
_GRACE_SECONDS = 0.5  # after one rank's failure, for failures of others that it did not cause
_ANSWER_SECONDS = 2.0  # to tell where a rank is
_CLEAN_UP_SECONDS = 10.0
_DEATH_SECONDS = 5.0  # for the exit code of a process that has hung up
_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


class RankPool:
    """Processes on this machine that stay ready, each one rank with one thread.

    Starting a rank costs seconds of imports; running a function on warm ranks costs milliseconds. Every call gets
    process groups of its own (backend gloo) and seed 0. What else a function changes in its process stays changed.
    After a call that failed its ranks are replaced, whatever state they are in. No rank outlives this process.

    Args:
        nproc: ranks at the most; each is started when it is first needed.
        preload: modules that the functions will need, imported once for all ranks (on Linux, where ranks are forked
            from one server process; it is multiprocessing's, so the first user in a process decides).

    Attributes:
        num_starts, start_seconds: ranks started so far, replacements included, and the time waited for them.
        num_calls, call_seconds: calls without errors so far, and the time they took.
    """

    def __init__(self, nproc: int, *, preload: Sequence[str] = ()) -> None:
        self.nproc = nproc
        self.num_starts = self.num_calls = 0
        self.start_seconds = self.call_seconds = 0.0
        self._context: Any = multiprocessing.get_context(_START_METHOD)
        if _START_METHOD == "forkserver":
            self._context.set_forkserver_preload(["omnitrain.parallel.spawn.worker", *preload])
        self._ranks: dict[int, _Worker] = {}
        self._numbers = itertools.count()

    def run(
        self, function: Callable[..., Any] | str, *args: Any, timeout_s: float, world: int | None = None
    ) -> list[Any]:
        """Call ``function(*args)`` on ranks 0 .. world - 1, between which ``torch.distributed`` is initialised.

        Args:
            function: of a module's top level, of a notebook, or ``"module:function"``.
            args: can be pickled, and the results too; tensors are copied.
            timeout_s: for all ranks together, their start not counted.
            world: number of ranks; all by default.

        Returns:
            What each rank returned.

        Raises:
            UserError: ``function`` or ``args`` cannot be sent to another process, or there are not enough ranks.
            RankError: a rank raised, died, or did not return in time.
        """
        world = self.nproc if world is None else world
        if not 1 <= world <= self.nproc:
            raise UserError(f"{world} ranks asked for; this pool has 1 to {self.nproc}")
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        call = _pickled(name, function, args)
        self._start(world)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="omnitrain-ranks-") as folder, self._discarding_on_error(world):
            case = Case(next(self._numbers), call, world, str(Path(folder, "store")), timeout_s)
            reports = self._reports(case)
            error = failure(name, timeout_s, reports)
            if error is not None:
                raise error
            self._finish(case)
        self.num_calls += 1
        self.call_seconds += time.monotonic() - began
        return [pickle.loads(report.result) for _, report in sorted(reports.items()) if isinstance(report, Done)]

    def close(self) -> None:
        """End all ranks. A later call starts new ones."""
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
            what = f"did not start within {_START_SECONDS:g} s" if code is None else f"ended with exit code {code}"
            hint = "if this is a script, are its last lines under `if __name__ == '__main__':`?"
            raise RankError(f"rank {rank} {what} while it was started; {hint}", [rank])

    def _discard(self, rank: int) -> None:
        worker = self._ranks.pop(rank, None)
        if worker is not None:
            worker.kill()

    @contextlib.contextmanager
    def _discarding_on_error(self, world: int) -> Iterator[None]:
        """Ranks in the middle of a case, or with connections to those, are of no use to the next one."""
        try:
            yield
        except BaseException:
            for rank in range(world):
                self._discard(rank)
            raise

    def _reports(self, case: Case) -> dict[int, Report]:
        """How the case ended, rank by rank. Ranks without a report in time are killed."""
        reports: dict[int, Any] = {}
        deadline = time.monotonic() + case.timeout_s
        for rank in range(case.world):
            if not self._ranks[rank].send(case):
                reports[rank] = self._bury(rank)
        while len(reports) < case.world:
            if any(not isinstance(report, Done) for report in reports.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            running = [rank for rank in range(case.world) if rank not in reports]
            heard = self._hear(running, case.number, (Done, Failed), deadline)
            if not heard:
                return reports | self._give_up(running, case.number)
            reports |= heard
        return reports

    def _hear(self, ranks: Sequence[int], number: int, kinds: tuple[type, ...], deadline: float) -> dict[int, Any]:
        """The next messages of these ranks, or their deaths; empty when the time is over."""
        by_connection = {self._ranks[rank].connection: rank for rank in ranks}
        while True:
            ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
            if not ready:
                return {}
            heard: dict[int, Any] = {}
            for connection in ready:
                rank = by_connection[connection]
                try:
                    message = receive(self._ranks[rank].connection)
                except (EOFError, OSError):
                    heard[rank] = self._bury(rank)
                    continue
                if isinstance(message, kinds) and message.number == number:
                    heard[rank] = message
            if heard:
                return heard

    def _bury(self, rank: int) -> Died:
        dead = Died(self._ranks[rank].exit_code())
        self._discard(rank)
        return dead

    def _give_up(self, running: Sequence[int], number: int) -> dict[int, Late | Died]:
        reports: dict[int, Any] = {}
        for rank in running:
            if not self._ranks[rank].send(Where(number)):
                reports[rank] = self._bury(rank)
        silent = [rank for rank in running if rank not in reports]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while silent and (heard := self._hear(silent, number, (Stack,), deadline)):
            for rank, answer in heard.items():
                reports[rank] = Late(answer.text) if isinstance(answer, Stack) else answer
            silent = [rank for rank in silent if rank not in heard]
        reports |= {rank: Late(None) for rank in silent}
        for rank in running:
            self._discard(rank)
        return reports

    def _finish(self, case: Case) -> None:
        """Let the ranks that are left clean up together; those that cannot are killed."""
        waiting = [rank for rank in range(case.world) if rank in self._ranks]
        for rank in waiting:
            self._ranks[rank].send(Finish(case.number))
        deadline = time.monotonic() + _CLEAN_UP_SECONDS
        while waiting and (heard := self._hear(waiting, case.number, (Clean,), deadline)):
            waiting = [rank for rank in waiting if rank not in heard]
        for rank in waiting:
            self._discard(rank)


class _Worker:
    """A rank's process as the pool sees it."""

    def __init__(self, context: Any, rank: int) -> None:
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=serve, args=(theirs, rank), name=f"rank {rank}")
        with main_without_file():
            self._process.start()
        theirs.close()
        # At exit, too: multiprocessing would wait there for processes that wait for their next case.
        self.kill = Finalize(self, _kill, args=(self._process, self.connection), exitpriority=0)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, message: Message) -> bool:
        """False: the process is gone."""
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


def _pickled(name: str, function: Callable[..., Any] | str, args: tuple[Any, ...]) -> bytes:
    try:
        return pickled((function, args))
    except Exception as error:  # whatever a foreign __reduce__ raises
        raise UserError(
            f"{name} cannot be sent to other processes ({error}); expected a function of a module's top level or "
            "'module:function', and arguments that can be pickled"
        ) from error
