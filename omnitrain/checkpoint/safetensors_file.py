"""Write a safetensors file tensor by tensor. Only what is written at the moment is in memory.

The format: the length of the header (8 bytes, little-endian), the header (JSON), then the tensors as raw bytes. The
bytes are those of ``safetensors.torch.save_file`` with ``metadata={"format": "pt"}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

_METADATA = {"format": "pt"}
_ALIGNMENT = 8  # bytes, of the header's end
# safetensors sorts by dtype, the last of these first, then by name.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_ORDER = list(_DTYPES)


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsFile:
    """A file that replaces ``path``; its tensors are written in any order. A context manager, whose end closes it."""

    def __init__(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] = _METADATA) -> None:
        header, self._begins, size = _header(entries, metadata)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.truncate(self._descriptor, size)
            self._write_at(header, 0)
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, of the dtype and shape of its entry; elements that are elsewhere are copied to memory."""
        tensor = tensor.detach()
        if type(tensor) is not Tensor:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        if tensor.numel():
            self._write_at(as_bytes(tensor.contiguous()).numpy().data, self._begins[name])

    def _write_at(self, content: bytes | memoryview, begin: int) -> None:
        left = memoryview(content)
        while left:  # the system writes at most 2 GiB at once
            written = os.pwrite(self._descriptor, left, begin)
            left, begin = left[written:], begin + written

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._descriptor)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as ``[bytes]`` uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of the file, where each tensor begins in it, and its size."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for entry in sorted(entries, key=lambda entry: (-_ORDER.index(entry.dtype), entry.name)):
        begin, end = end, end + entry.num_bytes
        begins[entry.name] = begin
        described[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + begin for name, begin in begins.items()}, len(first) + end
