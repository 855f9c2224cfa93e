"""The side of a :class:`~omnitrain.parallel.spawn.pool.RankPool` that runs in the rank's own process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from omnitrain.data.ahead import follow_main_process
from omnitrain.parallel.state import forget_parallel_state


@dataclass(frozen=True)
class Case:
    """One function to run on ``world`` ranks.

    Attributes:
        number: tells its messages from those of earlier cases.
        call: pickled ``(function or "module:function", args)``.
        store: path of the file by which its ranks find each other.
        timeout_s: longest wait of one collective.
    """

    number: int
    call: bytes
    world: int
    store: str
    timeout_s: float


@dataclass(frozen=True)
class Finish:
    """All ranks have reported: the case's process groups can go."""

    number: int


@dataclass(frozen=True)
class Where:
    """What is the main thread doing?"""

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
        at: system-wide monotonic clock, to tell the first failure from those that it caused.
        error: the exception, pickled, where it can be.
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
    """The process is up, its imports done."""

    number: int = -1


Message = Case | Finish | Where | Done | Failed | Stack | Clean | Ready


def send(connection: Connection, message: Message) -> None:
    """Pickled by value: multiprocessing's own ``send`` would put tensors into shared memory."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Message:
    """The next message.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    return pickle.loads(connection.recv_bytes())


def serve(connection: Connection, rank: int) -> None:
    """Run cases until the pool's process hangs up."""
    follow_main_process()
    multiprocessing.set_start_method(None, force=True)  # the pool's would cost every data process imports of its own
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.freeze()  # the imports need not be searched after every case
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
                _clean_up()
                self._send(Clean(message.number))

    def _listen(self) -> None:
        """Beside the main thread, so that a rank stuck in a collective still answers, and ends with its pool."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = receive(self._connection)
                if isinstance(message, Where):
                    self._send(Stack(message.number, self._stack_of_case()))
                else:
                    assert isinstance(message, Case | Finish)
                    self._inbox.put(message)
        os._exit(1)

    def _stack_of_case(self) -> str:
        """What the main thread does, without the frames that lead to the case."""
        frames = traceback.extract_stack(sys._current_frames()[self._main_thread])
        own = [index for index, frame in enumerate(frames) if frame.filename == __file__]
        return "".join(traceback.format_list(frames[own[-1] + 1 :])).rstrip()

    def _send(self, message: Message) -> None:
        with self._sending:
            send(self._connection, message)

    def _run(self, case: Case) -> None:
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
            report: Done | Failed = Done(case.number, pickle.dumps(_resolve(function)(*args)))
        except (Exception, SystemExit) as error:  # whatever the case raises is its result
            report = _failed(case.number, error)
        self._send(report)


def _resolve(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _failed(number: int, error: BaseException) -> Failed:
    at = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip()
    assert error.__traceback__ is not None
    below = error.__traceback__.tb_next or error.__traceback__  # the first frame is this file's
    text = "".join(traceback.format_exception(type(error), error, below)).rstrip()
    return Failed(number, at, summary, text, _pickled_or_none(error))


def _pickled_or_none(error: BaseException) -> bytes | None:
    """None for exceptions that pickle can write or read only in part, such as those with arguments of their own."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # anything can go wrong in a foreign class
        return None
    return pickled


def _clean_up() -> None:
    """Leave nothing of a case: its groups, their threads and sockets, and what torch remembers of its meshes."""
    forget_parallel_state()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # its entries hold meshes, equal to the next case's, whose groups are gone
