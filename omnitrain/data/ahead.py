"""A generator that runs ahead of its consumer, in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch

from omnitrain.data.message import Message, encode, receive, send
from omnitrain.errors import TrainingError, UserError

Item = TypeVar("Item")

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0  # for what a closed stream's process still has in hand
_SOCKET_BYTES = 1 << 20  # asked for, the system may give less: an item that fits waits there, in full
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class _Ended:
    """The last message: the generator's end, or what it raised."""

    error: Exception | None = None


def run_ahead(make_items: Callable[[], Generator[Item, None, None]], depth: int) -> Generator[Item, None, None]:
    """The items of a generator, made up to ``depth`` ahead in a background process while the consumer works.

    Of the work, nothing but copying finished items is left to the consumer's process. Closing the result closes the
    generator; an error in it arrives in its place; the process never outlives this one.

    Args:
        make_items: called in the process; it and the items can be pickled.
        depth: finished items that wait at the most.

    Raises:
        TrainingError: the process was killed, or stopped by an exception that is not the user's mistake.
    """
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    process = multiprocessing.Process(target=_produce, args=(make_items, depth, theirs), name="run_ahead", daemon=False)
    process.start()
    theirs.close()
    # At exit, too: multiprocessing would wait there for a process that waits for its reader.
    hang_up = Finalize(None, _hang_up, args=(ours,), exitpriority=0)
    try:
        while True:
            try:
                item = receive(ours)
            except (EOFError, ConnectionError):
                process.join()
                raise TrainingError(f"the data process ended with exit code {process.exitcode}") from None
            if isinstance(item, _Ended):
                break
            yield item
        if item.error is not None:
            raise item.error
    finally:
        hang_up()
        process.join(_PATIENCE_SECONDS)
        process.kill()  # it hangs, or is long gone
        process.join()


def _hang_up(connection: socket.socket) -> None:
    """Closing alone is not enough: processes forked since hold the same socket."""
    with contextlib.suppress(OSError):  # the other side is gone
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends (on Linux), however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def follow_main_process() -> None:
    """Leave signals to the process that started this one, take one thread, and end when that process ends.

    Ctrl-C, a hang-up and a scheduler's SIGTERM reach the whole group: the main process answers them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended before the line above
        os._exit(1)
    torch.set_num_threads(1)


def _produce(make_items: Callable[[], Generator[Any, None, None]], depth: int, out: socket.socket) -> None:
    follow_main_process()
    sender = _Sender(out, depth)
    error: Exception | None = None
    try:
        with contextlib.closing(make_items()) as items:
            for item in items:
                try:
                    is_read = sender.put(item)
                except RuntimeError as interruption:
                    # torch tells of a dead worker process wherever the main thread is; the generator knows what of.
                    items.throw(interruption)
                    raise
                if not is_read:
                    return
    except (UserError, TrainingError) as caught:
        error = caught
    except Exception:  # it must reach the training process, not only this one's stderr
        error = TrainingError(f"in the data process:\n{traceback.format_exc()}")
    sender.finish(error)
    if error is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # multiprocessing would wait for workers that are stuck behind a dead one; they follow this process


class _Sender:
    """A thread that sends items; the main thread makes them. A signal handler that raises must not cut a message."""

    def __init__(self, out: socket.socket, depth: int) -> None:
        """``depth``: items that wait at the most."""
        self._out = out
        self._waiting: queue.Queue[Message | None] = queue.Queue(maxsize=depth)
        self._nobody_reads = threading.Event()
        self._thread = threading.Thread(target=self._send, name="run_ahead", daemon=True)

    def put(self, item: Any) -> bool:
        """Hand over an item, as soon as there is room; False: nobody reads any more."""
        return self._put(encode(item))

    def finish(self, error: Exception | None) -> None:
        """Send the end, and wait until all is sent."""
        if self.put(_Ended(error)) and self._put(None):
            self._thread.join()

    def _put(self, message: Message | None) -> bool:
        if self._thread.ident is None:  # started late: no other thread can hold a lock while workers are forked
            self._thread.start()
        while not self._nobody_reads.is_set():
            with contextlib.suppress(queue.Full):
                self._waiting.put(message, timeout=_POLL_SECONDS)
                return True
        return False

    def _send(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                send(self._out, message)
        except OSError:
            self._nobody_reads.set()
