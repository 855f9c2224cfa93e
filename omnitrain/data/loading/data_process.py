"""Run a generator ahead of its consumer, in a separate process."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar

import torch

from omnitrain.errors import TrainingError, UserError

Message = list[bytes | memoryview]

_LENGTHS = struct.Struct("QQ")  # bytes of the header and of the arrays


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as numpy arrays, whose bytes pickle keeps out of the header."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def as_bytes(item: Any) -> bytes:
    """Encode ``item`` for ``pickle.loads``. Of a tensor that is a view, only the elements of the view are included."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(item)
    return stream.getvalue()


def encode(item: Any) -> Message:
    """Encode any object, with tensors on the CPU. Arrays are not copied: do not change them before they are sent."""
    stream = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=arrays.append).dump(item)
    views = [array.raw() for array in arrays]
    header = pickle.dumps((stream.getvalue(), [view.nbytes for view in views]))
    return [_LENGTHS.pack(len(header), sum(view.nbytes for view in views)) + header, *views]


def send(connection: socket.socket, message: Message) -> None:
    """Send a message from :func:`encode`; OSError: the receiver is gone."""
    for buffer in message:
        connection.sendall(buffer)


def receive(connection: socket.socket) -> Any:
    """Receive the next item, whose arrays are writable and share one block of memory; EOFError: the sender is gone."""
    header_bytes, array_bytes = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    pickled, sizes = pickle.loads(_read(connection, header_bytes))
    memory = memoryview(_read(connection, array_bytes))
    arrays = []
    for size in sizes:
        arrays.append(memory[:size])
        memory = memory[size:]
    return pickle.loads(pickled, buffers=arrays)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    unread = memoryview(data)
    while unread:
        received = connection.recv_into(unread, flags=socket.MSG_WAITALL)
        if not received:
            raise EOFError("the sender is gone")
        unread = unread[received:]
    return data


Item = TypeVar("Item")

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0  # time for the process of a closed stream to finish its item
_SOCKET_BYTES = 1 << 20  # requested buffer size, which the system may reduce; smaller items wait in it completely
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES, _LARGEST_KEPT = 128 << 20, 32 << 20  # of freed memory in all, and of one array


class _Ended(NamedTuple):
    error: Exception | None  # with which the generator ended


def run_ahead(make_items: Callable[[], Generator[Item, None, None]], depth: int) -> Generator[Item, None, None]:
    """Yield the items of a generator that runs up to ``depth`` items ahead in a background process.

    The consumer's process only copies finished items. Closing the result closes the generator. An error of the
    generator is raised after the items before it. The process never outlives this one. ``make_items`` and the items
    must be picklable. Raises TrainingError: the process was killed, or stopped by an error that is not a UserError.
    """
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    process = multiprocessing.Process(target=_produce, args=(make_items, depth, theirs), name="run_ahead", daemon=False)
    process.start()
    theirs.close()
    # Also at exit, where multiprocessing would otherwise wait for a process that waits for its reader.
    end = Finalize(None, _end, args=(process, ours), exitpriority=0)
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
        end()


def _end(process: multiprocessing.Process, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side has already ended
        connection.shutdown(socket.SHUT_RDWR)  # closing has no effect while forked processes hold the socket
    connection.close()
    process.join(_PATIENCE_SECONDS)
    process.kill()  # it hangs, or has already ended
    process.join()


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends for any reason (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Reuse freed memory (glibc): new pages would take a third of the time of preparing an image."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def follow_main_process(_worker: int = 0) -> None:
    """Ignore signals, which the main process handles, use one thread, and end when the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # the parent ended before the call above
        os._exit(1)
    torch.set_num_threads(1)
    keep_freed_memory()


def _produce(make_items: Callable[[], Generator[Any, None, None]], depth: int, out: socket.socket) -> None:
    follow_main_process()
    sender = _Sender(out, depth)
    error: Exception | None = None
    try:
        with contextlib.closing(make_items()) as items:
            for item in items:
                if not sender.put(item):
                    return
    except (UserError, TrainingError) as caught:
        error = caught
    except Exception:  # the training process must get the error, not only this process's stderr
        error = TrainingError(f"in the data process:\n{traceback.format_exc()}")
    sender.finish(error)
    if error is not None:
        sys.exit(1)


class _Sender:
    """A thread that sends items of the main thread, where a signal handler that raises could cut a message."""

    def __init__(self, out: socket.socket, depth: int) -> None:
        self._out = out
        self._waiting: queue.Queue[Message | None] = queue.Queue(maxsize=depth)
        self._reader_gone = threading.Event()
        self._thread = threading.Thread(target=self._send, name="run_ahead", daemon=True)

    def put(self, item: Any) -> bool:
        """Queue an item as soon as the queue has room. Return False if the reader is gone."""
        return self._put(encode(item))

    def finish(self, error: Exception | None) -> None:
        """Send the end, and wait until everything is sent."""
        if self.put(_Ended(error)) and self._put(None):
            self._thread.join()

    def _put(self, message: Message | None) -> bool:
        if self._thread.ident is None:  # start late, so that no other thread holds a lock while workers are forked
            self._thread.start()
        while not self._reader_gone.is_set():
            with contextlib.suppress(queue.Full):
                self._waiting.put(message, timeout=_POLL_SECONDS)
                return True
        return False

    def _send(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                send(self._out, message)
        except OSError:
            self._reader_gone.set()
