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

from omnitrain.data.message import receive, send
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

    Ctrl-C and a scheduler's SIGTERM reach the whole group: the main process answers them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended before the line above
        os._exit(1)
    torch.set_num_threads(1)


def _produce(make_items: Callable[[], Generator[Any, None, None]], depth: int, out: socket.socket) -> None:
    follow_main_process()
    error: Exception | None = None
    with contextlib.suppress(ConnectionError):  # nobody reads any more
        try:
            with contextlib.closing(_in_thread(make_items(), depth)) as items:
                for item in items:
                    send(out, item)
        except (UserError, TrainingError, ConnectionError) as caught:
            error = caught
        except Exception:
            error = TrainingError(f"in the data process:\n{traceback.format_exc()}")
        send(out, _Ended(error))


def _in_thread(items: Generator[Item, None, None], depth: int) -> Generator[Item, None, None]:
    """The items of a generator, made up to ``depth`` ahead in a thread.

    The first one is made in the calling thread: worker processes that ``items`` starts are forked from there, where no
    other thread can hold a lock.
    """
    try:
        first = next(items)
    except StopIteration:
        return
    waiting: queue.Queue[Item | _Ended] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Item | _Ended) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=_POLL_SECONDS)
                return

    def produce() -> None:
        error: Exception | None = None
        with contextlib.closing(items):
            try:
                while not stopped.is_set():
                    put(next(items))
            except StopIteration:
                pass
            except Exception as caught:
                error = caught
        put(_Ended(error))

    producer = threading.Thread(target=produce, name="run_ahead", daemon=True)
    producer.start()
    try:
        yield first
        while not isinstance(item := waiting.get(), _Ended):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        producer.join()
