"""Several ranks of one command on this machine.

Torch's elastic launcher starts the processes, redirects what they print, and ends them. Its agent, which ``torchrun``
puts above that, is left out: after a signal it does not tell how the ranks ended, and when a rank fails it gives the
others half a minute.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import Popen
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes

from omnitrain.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, TrainingError, UserError
from omnitrain.train.interrupt import TOGETHER_SECONDS, heard
from omnitrain.train.launch.environment import FIRST_TO_FAIL, LAUNCHER

_HOST = "127.0.0.1"
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # by torch's launcher
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0  # of the other ranks, when one has failed
_TRACEBACK_SECONDS = 10.0  # of the rank that failed first, when another one ends before it
_HURRY_SECONDS = 10.0  # after the second signal


def launch(arguments: Sequence[str], nproc: int, *, stop_seconds: float) -> int:
    """Run ``python ARGUMENTS`` in ``nproc`` processes with the environment of ranks, and wait for them.

    Rank 0 prints as this process would; of the others, only what they write to stderr is shown, with the rank before
    each line. Signals are handed on. When a rank fails, the others are ended within seconds.

    Args:
        arguments: of the python interpreter, such as ``["-m", "omnitrain", "run", "recipe.yaml"]``.
        nproc: number of ranks.
        stop_seconds: what the ranks get after a signal before they are killed.

    Returns:
        The exit code of a single process: 0; 2 where a rank ended so, with a message of its own; 130 where a signal
        ended the ranks.

    Raises:
        UserError: this process is a rank itself.
        TrainingError: a rank failed, was killed, or did not stop in time; names it and its exit.
    """
    if "RANK" in os.environ:
        raise UserError("--nproc starts ranks, and this process is one already (RANK is set); remove one of the two")
    _silence_torch()
    others = range(1, nproc)
    with tempfile.TemporaryDirectory(prefix="omnitrain-run-") as folder, _Signals() as signals:
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        with _without_handlers():
            context = start_processes(
                "rank",
                sys.executable,
                args=dict.fromkeys(range(nproc), tuple(arguments)),
                envs={rank: _environment(rank, nproc, store.port) for rank in range(nproc)},
                logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(others, Std.OUT), dict.fromkeys(others, Std.ERR)),
                log_line_prefixes={rank: f"[rank {rank}] " for rank in range(nproc)},
            )
        assert isinstance(context, SubprocessContext)
        processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        ranks = _Ranks(processes, stop_seconds, store)
        try:
            ranks.wait(signals)
        finally:
            context.close(signal.SIGKILL)  # whatever is left; and shows the last lines of stderr
    return ranks.exit_code()


def _silence_torch() -> None:
    """No log lines about the signals that end ranks: what a user has to know is returned or raised."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextlib.contextmanager
def _without_handlers() -> Iterator[None]:
    """Torch takes no signals while it starts the ranks: its handlers raise from wherever the start is."""
    given = os.environ.get(_HANDLED)
    os.environ[_HANDLED] = ""
    try:
        yield
    finally:
        del os.environ[_HANDLED]
        if given is not None:
            os.environ[_HANDLED] = given


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What ``torchrun`` would set, and the threads and network of ranks that share one machine."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RUN_ID": f"omnitrain-{os.getpid()}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cores() // nproc))),
        LAUNCHER: str(os.getpid()),
    }
    if sys.platform == "linux":  # gloo would look for the machine's name otherwise
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class _Signals:
    """Within this context signals are kept for :meth:`take`."""

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in heard(_SIGNALS)}
        self._caught: list[int] = []

    def take(self) -> list[int]:
        taken, self._caught = self._caught, []
        return taken

    def __enter__(self) -> _Signals:
        for number in self._before:
            signal.signal(number, self._keep)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)


@dataclass
class _Ranks:
    """The processes, and how they ended.

    Attributes:
        codes: rank -> exit code, in the order in which they ended.
        killed: ranks that did not end by themselves.
    """

    processes: Mapping[int, Popen]
    stop_seconds: float
    store: dist.TCPStore
    codes: dict[int, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    _handed_on: set[int] = field(default_factory=set)
    _interrupted_at: float | None = None
    _deadline: float = math.inf

    def wait(self, signals: _Signals) -> None:
        """Until all have ended, or the time is over that an interrupted or failed run has."""
        while len(self.codes) < len(self.processes) and time.monotonic() < self._deadline:
            for number in signals.take():
                self._hand_on(number)
            self._note_ends()
            time.sleep(_POLL_SECONDS)
        self.killed = [rank for rank in self.processes if rank not in self.codes]

    def exit_code(self) -> int:
        """See :func:`launch`."""
        # A rank that is not far enough to catch a signal ends by it.
        interrupted = {EXIT_INTERRUPTED, *(-number for number in self._handed_on)}
        failed = {rank: code for rank, code in self.codes.items() if code not in (0, *interrupted)}
        if failed:
            rank, code = next(iter(failed.items()))
            if code > 0 and EXIT_USER_ERROR in failed.values():  # what other ranks met is but the consequence
                return EXIT_USER_ERROR
            first = self._first_to_fail()
            if first is not None and code in (EXIT_FAILED, -signal.SIGABRT):  # other signals come from outside
                rank = first
            raise TrainingError(f"rank {rank} {_how_it_ended(self.codes.get(rank))}; the others were ended")
        if self.killed:
            ranks = f"rank{'s' * (len(self.killed) > 1)} {', '.join(map(str, self.killed))}"
            raise TrainingError(f"{ranks} did not stop within {self.stop_seconds:g} s (train.stop_seconds); killed")
        return EXIT_INTERRUPTED if interrupted.intersection(self.codes.values()) else 0

    def _hand_on(self, number: int) -> None:
        for process in self.processes.values():
            process.send_signal(number)  # to none that has ended
        self._handed_on.add(number)
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            self._end_within(self.stop_seconds)
        elif now - self._interrupted_at > TOGETHER_SECONDS:
            self._end_within(_HURRY_SECONDS)

    def _note_ends(self) -> None:
        polled = {rank: process.poll() for rank, process in self.processes.items() if rank not in self.codes}
        ended = {rank: code for rank, code in polled.items() if code is not None}
        # Killed ones first: errors of others at the same moment are but the consequence.
        self.codes |= dict(sorted(ended.items(), key=lambda item: item[1] >= 0))
        for code in ended.values():
            if code == EXIT_INTERRUPTED or -code in self._handed_on:
                self._end_within(self.stop_seconds)
            elif code != 0:
                speaks = self._first_to_fail() not in (None, *self.codes)
                self._end_within(_TRACEBACK_SECONDS if speaks else _LAST_WORDS_SECONDS)

    def _first_to_fail(self) -> int | None:
        """The rank that said so. Others may end before it, and killed ones say nothing."""
        return int(self.store.get(FIRST_TO_FAIL)) if self.store.check([FIRST_TO_FAIL]) else None

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return f"failed, and did not end within {_TRACEBACK_SECONDS:g} s"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):  # a number without a name
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    return f"was killed by signal {-code} (exit code {code})"
