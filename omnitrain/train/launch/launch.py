"""Run one command in several ranks on this machine.

Torch's elastic launcher starts the processes, redirects their output, and ends them. The agent of ``torchrun`` is not
used: after a signal it does not report how the ranks ended, and when a rank fails it waits half a minute for
the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import Popen

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes
from torch.numa.binding import AffinityMode, NumaOptions

from omnitrain.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REQUEUE, EXIT_USER_ERROR, TrainingError, UserError
from omnitrain.parallel.environment import available_memory
from omnitrain.torch_private import output_streams
from omnitrain.train.interrupt import TOGETHER_SECONDS, handled
from omnitrain.train.launch.environment import FIRST_TO_FAIL, LAUNCHER

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def crowding(device: str, num_ranks: int) -> str | None:
    """Return the warning for ranks of this machine that would share cores; None: none would, or they train on CUDA."""
    cores = num_cores()
    if num_ranks <= cores or device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return None
    # A rank imports at least what this process has imported: python and torch.
    needed = num_ranks * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
    free = available_memory()
    left = "" if free is None else f", and {free / 2**30:.1f} GiB are free"
    return (
        f"--nproc {num_ranks} on {cores} core{'s' * (cores > 1)}: about {num_ranks / cores:.3g} ranks share a core, so "
        f"the start alone may take minutes; {num_ranks} ranks need at least {needed / 2**30:.1f} GiB of memory without "
        f"the model{left}"
    )


_HOST = "127.0.0.1"
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.05
_LAST_MESSAGE_SECONDS = 2.0  # time for other ranks to end after one has failed
_TRACEBACK_SECONDS = 10.0  # time for the rank that failed first to end after another one has ended
_HURRY_SECONDS = 10.0  # time for the ranks to end after the second signal


class RanksLostError(TrainingError):
    """Ranks were killed from outside of the run, by the system's out-of-memory killer for example, or crashed."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def launch(arguments: Sequence[str], nproc: int, *, stop_seconds: float, places: Sequence[int] | None = None) -> int:
    """Run ``python ARGUMENTS`` in ``nproc`` processes with the environment of ranks, and wait for them.

    Rank 0 prints to this terminal. Of the other ranks only stderr is shown, with the rank before each line. The
    launcher forwards signals to the ranks. When a rank fails, it ends the others within seconds, and ``stop_seconds``
    after a signal it kills them. ``places``: for each rank its place on this machine, such as the index of a CUDA
    device. None: the first ones. Returns the exit code that a single process would have: 0; 2 if a rank printed a user
    error; 143 if SIGTERM ended the ranks, 130 if another signal did. Raises UserError: this process is already a rank;
    RanksLostError: a rank was killed, and nobody asked the run to end; TrainingError: a rank failed, was killed, or did
    not stop in time; the message names it and its exit code.
    """
    if "RANK" in os.environ:
        raise UserError(
            "--nproc starts ranks, but this process is already a rank (RANK is set); remove --nproc or unset RANK"
        )
    # Torch's log lines about ended ranks are silenced, because the launcher reports everything a user needs.
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    others = range(1, nproc)
    signals: list[int] = []  # that have arrived
    with (
        tempfile.TemporaryDirectory(prefix="omnitrain-run-") as folder,
        handled(_SIGNALS, lambda number, _: signals.append(number)),
    ):
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        with _without_handlers():
            context = start_processes(
                "rank",
                sys.executable,
                args=dict.fromkeys(range(nproc), tuple(arguments)),
                envs={rank: _environment(rank, nproc, store.port) | _devices(places) for rank in range(nproc)},
                logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(others, Std.OUT), dict.fromkeys(others, Std.ERR)),
                log_line_prefixes={rank: f"[rank {rank}] " for rank in range(nproc)},
                numa_options=NumaOptions(AffinityMode.NODE, True) if torch.cuda.is_available() else None,
            )
        assert isinstance(context, SubprocessContext)
        processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        ranks = _Ranks(processes, stop_seconds, store)
        try:
            ranks.wait(signals)
        finally:
            context.close(signal.SIGKILL)  # kills remaining processes, and shows the last lines of stderr
            for handler in context.subprocess_handlers.values():
                for stream in output_streams(handler):
                    if stream is not None:  # torch leaves those of ended processes open
                        stream.close()
    return ranks.exit_code()


@contextlib.contextmanager
def _without_handlers() -> Iterator[None]:
    """Keep torch from handling signals while it starts the ranks: its handlers raise anywhere in the start."""
    before = os.environ.get(_HANDLED)
    os.environ[_HANDLED] = ""
    try:
        yield
    finally:
        del os.environ[_HANDLED]
        if before is not None:
            os.environ[_HANDLED] = before


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the variables that ``torchrun`` would set, and threads and network for ranks on one machine."""
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
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // nproc))),
        LAUNCHER: str(os.getpid()),
    }
    if sys.platform == "linux":  # otherwise gloo would resolve the machine's name
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _devices(places: Sequence[int] | None) -> dict[str, str]:
    """Return the variable that shows the ranks only the CUDA devices of their places, so that rank 0 has the first."""
    if places is None:
        return {}
    visible = os.environ.get(_VISIBLE)
    names = [str(place) for place in range(max(places) + 1)] if visible is None else visible.split(",")
    if len(names) <= max(places):  # the ranks have no devices of their own
        return {}
    return {_VISIBLE: ",".join(names[place] for place in places)}


@dataclass
class _Ranks:
    """The processes, their exit codes in the order of their ends, and the ranks that did not end in time."""

    processes: Mapping[int, Popen]
    stop_seconds: float
    store: dist.TCPStore
    codes: dict[int, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    _forwarded: set[int] = field(default_factory=set)
    _interrupted_at: float | None = None
    _deadline: float = math.inf

    def wait(self, signals: list[int]) -> None:
        """Wait until all have ended, or until the deadline of an interrupted or failed run."""
        while len(self.codes) < len(self.processes) and time.monotonic() < self._deadline:
            while signals:
                self._forward(signals.pop(0))
            self._note_ends()
            time.sleep(_POLL_SECONDS)
        self.killed = [rank for rank in self.processes if rank not in self.codes]

    def exit_code(self) -> int:
        """See :func:`launch`."""
        # A rank that has not installed its handlers yet ends by the signal.
        terminated = {EXIT_REQUEUE, *({-signal.SIGTERM} if signal.SIGTERM in self._forwarded else ())}
        interrupted = {EXIT_INTERRUPTED, *terminated, *(-number for number in self._forwarded)}
        failed = {rank: code for rank, code in self.codes.items() if code not in (0, *interrupted)}
        if failed:
            rank, code = next(iter(failed.items()))
            if code > 0 and EXIT_USER_ERROR in failed.values():  # other ranks failed as a consequence
                return EXIT_USER_ERROR
            first = self._first_to_fail()
            if first is not None and code in (EXIT_FAILED, -signal.SIGABRT):  # other signals come from outside
                rank = first
            message = f"rank {rank} {_how_it_ended(self.codes.get(rank))}; the other ranks were ended"
            raise RanksLostError(message, lost) if (lost := self._lost()) else TrainingError(message)
        if self.killed:
            ranks = f"rank{'s' * (len(self.killed) > 1)} {', '.join(map(str, self.killed))}"
            raise TrainingError(f"{ranks} did not stop within {self.stop_seconds:g} s (train.stop_seconds); killed")
        if terminated.intersection(self.codes.values()):
            return EXIT_REQUEUE
        return EXIT_INTERRUPTED if interrupted.intersection(self.codes.values()) else 0

    def _lost(self) -> list[int]:
        """Return the ranks that were killed or crashed; none in a run that was asked to end, or has a user's error."""
        if self._forwarded or EXIT_USER_ERROR in self.codes.values():
            return []
        aborts = self._first_to_fail() is not None  # after an error, other ranks may abort as a consequence
        return [rank for rank, code in self.codes.items() if code < 0 and not (aborts and code == -signal.SIGABRT)]

    def _forward(self, number: int) -> None:
        for process in self.processes.values():
            process.send_signal(number)  # does nothing if the process has ended
        self._forwarded.add(number)
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            self._end_within(self.stop_seconds)
        elif number != signal.SIGTERM and now - self._interrupted_at > TOGETHER_SECONDS:
            self._end_within(_HURRY_SECONDS)

    def _note_ends(self) -> None:
        polled = {rank: process.poll() for rank, process in self.processes.items() if rank not in self.codes}
        ended = {rank: code for rank, code in polled.items() if code is not None}
        # Killed ranks come first, because simultaneous errors of others are a consequence.
        self.codes |= dict(sorted(ended.items(), key=lambda item: item[1] >= 0))
        for code in ended.values():
            if code in (EXIT_INTERRUPTED, EXIT_REQUEUE) or -code in self._forwarded:
                self._end_within(self.stop_seconds)
            elif code != 0:
                is_first_running = self._first_to_fail() not in (None, *self.codes)
                self._end_within(_TRACEBACK_SECONDS if is_first_running else _LAST_MESSAGE_SECONDS)

    def _first_to_fail(self) -> int | None:
        """Return the rank that reported to be first. Others may end before it, and killed ranks report nothing."""
        return int(self.store.get(FIRST_TO_FAIL)) if self.store.check([FIRST_TO_FAIL]) else None

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return f"failed and did not end within {_TRACEBACK_SECONDS:g} s"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):  # a number without a name
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    return f"was killed by signal {-code} (exit code {code})"


def launch_with_restarts(
    arguments: Callable[[], Sequence[str]],
    nproc: int,
    *,
    max_restarts: int,
    fits: Callable[[int], bool],
    say: Callable[[str], None],
    stop_seconds: float,
) -> int:
    """Call :func:`launch`, and again on fewer ranks whenever ranks were killed; return its last exit code.

    Places on this machine (on CUDA: devices) in which a rank was killed are not used again. Of the others, so many are
    used as the run can divide itself over (``fits``); 143: it works on none of the ranks that are left. An error of the
    run itself never starts it again. ``arguments`` of the interpreter are asked for before each start.
    """
    left = used = list(range(nproc))
    places: list[int] | None = None  # all of them
    for restart in range(1, max_restarts + 1):
        try:
            return launch(arguments(), len(used), stop_seconds=stop_seconds, places=places)
        except RanksLostError as lost:
            size_before = len(used)
            gone = {used[rank] for rank in lost.ranks}
            left = [place for place in left if place not in gone]
            if not left:  # all crashed alike
                raise
            used = places = left[: next((size for size in range(len(left), 0, -1) if fits(size)), 0)]
            if not used:
                say(f"{lost}; the run does not work on fewer than {size_before} ranks, so it ends")
                return EXIT_REQUEUE
            idle = f", {len(left) - len(used)} idle" if len(used) < len(left) else ""
            say(f"{lost}; restart {restart} of {max_restarts} on {len(used)} rank{'s' * (len(used) > 1)}{idle}")
    return launch(arguments(), len(used), stop_seconds=stop_seconds, places=places)
