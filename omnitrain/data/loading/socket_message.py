"""Send objects that contain tensors over a local socket: one header, then the bytes of all arrays."""

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
