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
from typing import Any

import torch
import torch.distributed as dist

from omnitrain.data.loading.data_process import follow_main_process
from omnitrain.parallel.state import leave_process_groups

_COLORED = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")


@dataclass(frozen=True)
class Case:
    """One function to run on ``world`` ranks.

    Attributes:
        number: identifies the messages of this case.
        call: pickled ``(function or "module:function", args)``.
        world: number of ranks.
        store: path of the file of its ``FileStore``.
        timeout_s: timeout of its collectives, in seconds.
        cells: name of a cell of a notebook -> its lines, which tracebacks then show. The rank gets the environment of a
            launcher, and sends what it prints. None: it prints to where its parent does.
    """

    number: int
    call: bytes
    world: int
    store: str
    timeout_s: float
    cells: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class Printed:
    """Whole lines that the function printed."""

    number: int
    text: str


@dataclass(frozen=True)
class Finish:
    """Request to clean up: all ranks have reported, so the process groups of the case can be destroyed."""

    number: int


@dataclass(frozen=True)
class Where:
    """Request for the stack of the main thread."""

    number: int


@dataclass(frozen=True)
class Done:
    """The case returned ``result`` (pickled)."""

    number: int
    result: bytes


@dataclass(frozen=True)
class Failed:
    """The case raised.

    Attributes:
        at: time of the system-wide monotonic clock, to find the first failure.
        summary: type and message of the exception.
        traceback: its formatted traceback.
        error: the pickled exception; None if it cannot be pickled.
    """

    number: int
    at: float
    summary: str
    traceback: str
    error: bytes | None


@dataclass(frozen=True)
class Stack:
    """Answer to :class:`Where`."""

    number: int
    text: str


@dataclass(frozen=True)
class Clean:
    """Answer to :class:`Finish`."""

    number: int


@dataclass(frozen=True)
class Ready:
    """The process has started and finished its imports."""

    number: int = -1


Message = Case | Finish | Where | Printed | Done | Failed | Stack | Clean | Ready


def send(connection: Connection, message: Message) -> None:
    """Send a message pickled by value; multiprocessing's ``send`` would move tensors into shared memory."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Message:
    """Return the next message.

    Raises:
        EOFError, OSError: the other process has ended.
    """
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
        self._inbox: queue.SimpleQueue[Case | Finish] = queue.SimpleQueue()
        self._main_thread = threading.get_ident()
        self._send(Ready())
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def serve(self) -> None:
        while True:
            message = self._inbox.get()
            if isinstance(message, Case):
                self._run(message)
            else:
                leave_process_groups()
                gc.freeze()  # what outlives a case, as modules that it imported; later collections skip it
                self._send(Clean(message.number))

    def _listen(self) -> None:
        """Receive messages in a thread, so that a rank stuck in a collective still answers and ends with its pool."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = receive(self._connection)
                if isinstance(message, Where):
                    frames = traceback.extract_stack(sys._current_frames()[self._main_thread])
                    last = max(index for index, frame in enumerate(frames) if frame.filename == __file__)
                    case_frames = frames[last + 1 :]  # without the frames of this file, which lead to the case
                    self._send(Stack(message.number, "".join(traceback.format_list(case_frames)).rstrip()))
                else:
                    assert isinstance(message, Case | Finish)
                    self._inbox.put(message)
        os._exit(1)

    def _send(self, message: Message) -> None:
        with self._sending:
            send(self._connection, message)

    def _run(self, case: Case) -> None:
        with self._as_launched(case.number, case.world, case.cells) if case.cells is not None else nullcontext():
            report = self._report(case)
        self._send(report)

    @contextlib.contextmanager
    def _as_launched(self, number: int, world: int, cells: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Give this process the environment of a rank, and send what is printed in it."""
        ranks = {"RANK": self._rank, "LOCAL_RANK": self._rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        for name in _COLORED:  # a kernel has them; what is sent is no terminal, so a bar would be lines with codes
            os.environ.pop(name, None)
        for name, lines in cells.items():
            linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        stream = _SentLines(lambda text: self._send(Printed(number, text)))
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield
        stream.end()

    def _report(self, case: Case) -> Done | Failed:
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
            return Done(case.number, pickle.dumps(_resolve(function)(*args)))
        except (Exception, SystemExit) as error:  # the pool reports any error of the case
            return _failed(case.number, error)


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


def _resolve(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _failed(number: int, error: BaseException) -> Failed:
    at = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip()
    assert error.__traceback__ is not None
    case_traceback = error.__traceback__.tb_next or error.__traceback__  # the first frame is this file's
    text = "".join(traceback.format_exception(type(error), error, case_traceback)).rstrip()
    return Failed(number, at, summary, text, _pickled_or_none(error))


def _pickled_or_none(error: BaseException) -> bytes | None:
    """The pickled exception; None if pickle cannot write it or read it back."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # pickling can raise any type
        return None
    return pickled
