"""Hand a value with tensors to another process; the tensors are copied to host memory that both processes share."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes
_STEP = 2**20  # bytes in which the memory grows


@dataclass(frozen=True)
class _Place:
    """Where the copy of a tensor of that dtype and shape begins, in bytes."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        return self.begin + self.count * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Return the copy, a view of the memory."""
        return memory[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SharedMessage:
    """Where a value lies in the shared memory: from ``begin`` to ``end`` without its tensors, which lie before it."""

    begin: int
    end: int


class SharedMemory:
    """Host memory for copies of tensors that grows; a ``memfd``, since containers limit ``/dev/shm`` to 64 MB."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("omnitrain checkpoint")
        self._memory, self._is_pinned = _mapped(self.descriptor, 0), False

    def message(self, value: Any) -> SharedMessage:
        """Copy the tensors of ``value``. The other process must have read the message before this one."""
        pickler, stream = _pickled(value)
        content = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        message = SharedMessage(pickler.end, pickler.end + len(content))
        if message.end > len(self._memory):
            self._resize(-(-message.end // _STEP) * _STEP)
        self._memory[message.begin : message.end] = content
        for place, tensor in pickler.copies:
            place.of(self._memory).copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for _, tensor in pickler.copies):
            torch.cuda.synchronize()
        return message

    def close(self) -> None:
        """Free the memory, as soon as the other process has ended, too."""
        self._resize(0)
        os.close(self.descriptor)

    def _resize(self, size: int) -> None:
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
        os.ftruncate(self.descriptor, size)
        self._memory = _mapped(self.descriptor, size)
        self._is_pinned = bool(size) and torch.cuda.is_initialized()  # copies from the device are faster
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))


def received(message: SharedMessage, descriptor: int) -> Any:
    """Return the value of a message in the other process; its tensors lie in the shared memory."""
    memory = mmap.mmap(descriptor, message.end)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: _Place) -> Tensor:
            if not place.count:
                return torch.empty(place.shape, dtype=place.dtype)
            # Each has a storage of its own: torch.distributed.checkpoint copies any larger one, and keeps the copies.
            tensor = torch.frombuffer(memory, dtype=place.dtype, count=place.count, offset=place.begin)
            return tensor.view(place.shape)

    with memoryview(memory) as content:
        return Unpickler(io.BytesIO(content[message.begin :])).load()


def require_sendable(value: Any) -> None:
    """Raise a PicklingError if a part of ``value`` is defined in the main script or notebook, or cannot be pickled."""
    _pickled(value)


def _pickled(value: Any) -> tuple[_MemoryPickler, io.BytesIO]:
    stream = io.BytesIO()
    pickler = _MemoryPickler(stream)
    try:
        pickler.dump(value)
    except (AttributeError, TypeError) as error:  # what pickle raises of functions in functions, locks and files
        raise pickle.PicklingError(str(error)) from None
    return pickler, stream


class _MemoryPickler(pickle.Pickler):
    """Pickles the place of a tensor's copy instead of the tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.copies: list[tuple[_Place, Tensor]] = []
        self.end = 0

    def persistent_id(self, value: Any) -> _Place | None:
        if not isinstance(value, Tensor):
            return None
        place = _Place(-(-self.end // _ALIGNMENT) * _ALIGNMENT, value.dtype, tuple(value.shape))
        self.copies.append((place, value.detach()))
        self.end = place.end
        return place

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ in ("__main__", "__mp_main__"):
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the main script or notebook")
        return NotImplemented


def _mapped(descriptor: int, size: int) -> Tensor:
    """Return the memory as ``[size]`` uint8."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
