"""Objects full of tensors over a local socket: one header, then all arrays as one run of bytes."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from typing import Any

import torch

Message = list[bytes | memoryview]

_LENGTHS = struct.Struct("QQ")  # bytes of the header and of the arrays


class _Pickler(pickle.Pickler):
    """Takes CPU tensors for the numpy arrays they are, whose bytes pickle leaves out of the header."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def as_bytes(item: Any) -> bytes:
    """``item`` for ``pickle.loads``; of a tensor that is a view, only what it shows."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(item)
    return stream.getvalue()


def encode(item: Any) -> Message:
    """``item`` as the runs of bytes that stand for it. Its arrays are not copied: leave them alone until they are sent.

    Args:
        item: any object that can be pickled; its tensors are on the CPU.
    """
    stream = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=arrays.append).dump(item)
    views = [array.raw() for array in arrays]
    header = pickle.dumps((stream.getvalue(), [view.nbytes for view in views]))
    return [_LENGTHS.pack(len(header), sum(view.nbytes for view in views)) + header, *views]


def send(connection: socket.socket, message: Message) -> None:
    """Send what :func:`encode` made.

    Raises:
        OSError: nobody reads any more.
    """
    for run in message:
        connection.sendall(run)


def receive(connection: socket.socket) -> Any:
    """The next item. Its arrays share one block of memory, and are writable.

    Raises:
        EOFError: the sender is gone.
    """
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
