"""The code of a :class:`~omnitrain.parallel.spawn.pool.RankPool` that runs in a rank's process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import linecache
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from omnitrain.data.loading.data_process import follow_main_process
from omnitrain.parallel.state import leave_process_groups

_COLORED = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")


@dataclass(frozen=True)
class Case:
    """One function to run on ``world`` ranks."""

    call: bytes  # pickled (function or "module:function", args)
    world: int  # number of ranks
    store: str  # path of the file of its FileStore
    timeout_s: float  # timeout of its collectives, in seconds
    # name of a cell of a notebook -> its lines, which tracebacks then show. The rank gets the environment of a
    # launcher, and sends what it prints. None: it prints to where its parent does
    cells: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class Failed:
    """The exception of a case."""

    at: float  # time of the system-wide monotonic clock, to find the first failure
    summary: str  # type and message of the exception
    traceback: str  # its formatted traceback
    error: bytes | None  # the pickled exception; None if it cannot be pickled


class PoolMessage(NamedTuple):
    """What a pool and a rank say to each other about the case ``number``.

    The pool says ``run`` (a :class:`Case`), ``where``, or ``clean``: all ranks have reported, so the process groups
    of the case can be destroyed. A rank says ``ready`` after its imports, ``printed`` (whole lines), ``done`` (the
    pickled result), ``failed`` (a :class:`Failed`), ``late`` (its stack, the answer to ``where``), and ``clean``.
    """

    kind: str
    number: int = -1
    value: Any = None


def send(connection: Connection, message: PoolMessage) -> None:
    """Send a message pickled by value; multiprocessing's ``send`` would move tensors into shared memory."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> PoolMessage:
    """Return the next message; raises EOFError or OSError if the other process has ended."""
    return pickle.loads(connection.recv_bytes())


def serve(connection: Connection, rank: int) -> None:
    """Run cases until the pool's process closes the connection."""
    follow_main_process()
    multiprocessing.set_start_method(None, force=True)  # with the pool's method, every data process would import again
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.freeze()  # gc.collect after each case then skips the imported modules
    _Rank(connection, rank).serve()


class _Rank:
    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[PoolMessage] = queue.SimpleQueue()
        self._main_thread = threading.get_ident()
        self._send(PoolMessage("ready"))
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def serve(self) -> None:
        while True:
            kind, number, case = self._inbox.get()
            if kind == "run":
                with self._as_launched(number, case) if case.cells is not None else nullcontext():
                    report = self._report(number, case)
                self._send(report)
            else:
                leave_process_groups()
                gc.freeze()  # what outlives a case, as modules that it imported; later collections skip it
                self._send(PoolMessage("clean", number))

    def _listen(self) -> None:
        """Receive messages in a thread, so that a rank stuck in a collective still answers and ends with its pool."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = receive(self._connection)
                if message.kind == "where":
                    frames = traceback.extract_stack(sys._current_frames()[self._main_thread])
                    last = max(index for index, frame in enumerate(frames) if frame.filename == __file__)
                    case_frames = frames[last + 1 :]  # without the frames of this file, which lead to the case
                    stack = "".join(traceback.format_list(case_frames)).rstrip()
                    self._send(PoolMessage("late", message.number, stack))
                else:
                    self._inbox.put(message)
        os._exit(1)

    def _send(self, message: PoolMessage) -> None:
        with self._sending:
            send(self._connection, message)

    @contextlib.contextmanager
    def _as_launched(self, number: int, case: Case) -> Iterator[None]:
        """Give this process the environment of a rank, and send the text that it prints."""
        world = case.world
        ranks = {"RANK": self._rank, "LOCAL_RANK": self._rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        for name in _COLORED:  # a kernel has them; what is sent is no terminal, so a bar would be lines with codes
            os.environ.pop(name, None)
        for name, lines in (case.cells or {}).items():
            linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        stream = _SentLines(lambda text: self._send(PoolMessage("printed", number, text)))
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield
        stream.end()

    def _report(self, number: int, case: Case) -> PoolMessage:
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(case.store, case.world),
                rank=self._rank,
                world_size=case.world,
                timeout=timedelta(seconds=case.timeout_s),
            )
            torch.manual_seed(0)
            function, args = pickle.loads(case.call)
            if isinstance(function, str):
                module, _, name = function.partition(":")
                function = getattr(importlib.import_module(module), name)
            return PoolMessage("done", number, pickle.dumps(function(*args)))
        except (Exception, SystemExit) as error:  # the pool reports any error of the case
            return PoolMessage("failed", number, _failed(error))


class _SentLines(io.TextIOBase):
    """A stream that sends each line when it is whole."""

    def __init__(self, send_text: Callable[[str], None]) -> None:
        self._send_text, self._rest = send_text, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._send_text(whole + newline)
        return len(text)

    def end(self) -> None:
        """Send the last line, if it has no end."""
        if self._rest:
            self.write("\n")


def _failed(error: BaseException) -> Failed:
    at = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip()
    assert error.__traceback__ is not None
    case_traceback = error.__traceback__.tb_next or error.__traceback__  # the first frame is this file's
    text = "".join(traceback.format_exception(type(error), error, case_traceback)).rstrip()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # pickling can raise any type
        return Failed(at, summary, text, None)
    return Failed(at, summary, text, pickled)
