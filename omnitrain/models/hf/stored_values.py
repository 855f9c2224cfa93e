"""Values that lie in safetensors files, and the operations on them: slices, concatenations, casts.

A value is a tree. Its leaves are tensors in files; the inner nodes are the operations that a loader recorded. Nothing
is read until :func:`read` or ``write_to`` asks for a region, and then only the parts of files that the region needs.
Trees can be pickled, so one rank records how all weights are made of files, and every rank reads its own shards.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from omnitrain.torch_private import tree_leaves, tree_map_only

Region: TypeAlias = tuple[slice, ...]  # of each dim, with a start and a stop

_WIDENINGS = {torch.bfloat16: (torch.float32, torch.float64), torch.float16: (torch.float32, torch.float64)}


class StoredValue:
    """A tensor as a tree over files. ``parts``: the values that it is made of; empty for a leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredValue, ...] = ()

    def write_to(self, out: Tensor, region: Region) -> None:
        """Write a region to ``out``, a tensor of the region's shape, on any device. Other dtypes are cast to."""
        if out.numel():
            self._write(out, region)

    def _write(self, out: Tensor, region: Region) -> None:
        raise NotImplementedError


def read(value: StoredValue, region: Region | None = None) -> Tensor:
    """Return a region of a value in new host memory; None: all of it."""
    region = whole_of(value.shape) if region is None else region
    out = torch.empty(sizes_of(region), dtype=value.dtype)
    value.write_to(out, region)
    return out


def whole_of(shape: tuple[int, ...]) -> Region:
    """Return the region of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def sizes_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(dim.stop - dim.start for dim in region)


def leaves_of(value: StoredValue) -> Iterator[StoredValue]:
    """Yield the leaves of a value, from left to right."""
    if not value.parts:
        yield value
    for part in value.parts:
        yield from leaves_of(part)


class SliceReader:
    """Reads slices of safetensors files. All reads go through one instance, :data:`FILES`."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of all slices that were asked for
        self.on_read: Callable[[], None] | None = None  # called after each read
        self._open: dict[str, Any] = {}

    def slice_of(self, file: str, name: str, region: Region) -> Tensor:
        """Return a slice of a tensor, in memory that the file is mapped to: copy it before the file is closed."""
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        found: Tensor = self._open[file].get_slice(name)[region or ...]
        self.num_bytes += found.nbytes
        if self.on_read is not None:
            self.on_read()
        return found

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()


FILES = SliceReader()


class InFile(StoredValue):
    """A tensor in a file."""

    def __init__(self, file: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.file, self.name, self.shape, self.dtype = file, name, shape, dtype

    def _write(self, out: Tensor, region: Region) -> None:
        out.copy_(FILES.slice_of(self.file, self.name, region))


class InMemory(StoredValue):
    """A tensor in memory, such as one that was written to after loading."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def _write(self, out: Tensor, region: Region) -> None:
        out.copy_(self.tensor[region])


class View(StoredValue):
    """A slice or selection of ``value``, or its dims in another order, or with new dims of size 1."""

    def __init__(
        self,
        value: StoredValue,
        dims: Sequence[int | None],  # the dim of `value` that each is; None: a new one
        ranges: Mapping[int, tuple[int, int]] = MappingProxyType({}),  # dim of `value` -> first entry, and their number
    ) -> None:
        self.parts, self.dtype = (value,), value.dtype
        whole = {dim: (0, size) for dim, size in enumerate(value.shape)} | dict(ranges)
        self._dims, self._starts = tuple(dims), tuple(start for start, _ in whole.values())
        self.shape = tuple(1 if dim is None else whole[dim][1] for dim in dims)

    def _write(self, out: Tensor, region: Region) -> None:
        source = [slice(start, start + 1) for start in self._starts]
        for dim, asked in zip(self._dims, region, strict=True):
            if dim is not None:
                source[dim] = slice(asked.start + self._starts[dim], asked.stop + self._starts[dim])
        kept = [dim for dim in self._dims if dim is not None]
        order = [*kept, *(dim for dim in range(len(source)) if dim not in kept)]
        out = out[tuple(0 if dim is None else slice(None) for dim in self._dims)]
        out = out[(..., *[None] * (len(order) - len(kept)))]
        self.parts[0].write_to(out.permute([order.index(dim) for dim in range(len(order))]), tuple(source))


class Concatenated(StoredValue):
    """Several values end to end along a dim."""

    def __init__(self, parts: tuple[StoredValue, ...], dim: int) -> None:
        self.parts, self.dim, self.dtype = parts, dim, parts[0].dtype
        self.shape = _with(parts[0].shape, dim, sum(part.shape[dim] for part in parts))

    def _write(self, out: Tensor, region: Region) -> None:
        asked, offset = region[self.dim], 0
        for part in self.parts:
            size = part.shape[self.dim]
            start, stop = max(asked.start, offset), min(asked.stop, offset + size)
            if start < stop:
                there = out.narrow(self.dim, start - asked.start, stop - start)
                part.write_to(there, _with(region, self.dim, slice(start - offset, stop - offset)))
            offset += size


class Reshaped(StoredValue):
    """The same elements in another shape. Rows of the value that hold none of the region are not read."""

    def __init__(self, value: StoredValue, shape: tuple[int, ...]) -> None:
        self.parts, self.shape, self.dtype = (value,), shape, value.dtype

    def _write(self, out: Tensor, region: Region) -> None:
        (value,) = self.parts
        rows, of_row = region[:1] or (slice(0, 1),), math.prod(self.shape[1:])
        first, last = rows[0].start * of_row, rows[0].stop * of_row  # elements of these rows
        of_source_row = math.prod(value.shape[1:])
        start, stop = first // of_source_row, -(-last // of_source_row)
        source = whole_of(value.shape)
        found = read(value, (slice(start, stop), *source[1:]) if source else source)
        flat = found.reshape(-1)[first - start * of_source_row : last - start * of_source_row]
        out.copy_(flat.view(*sizes_of(rows), *self.shape[1:])[(slice(None), *region[1:])].view(out.shape))


class Cast(StoredValue):
    """The same in another dtype."""

    def __init__(self, value: StoredValue, dtype: torch.dtype) -> None:
        self.parts, self.shape, self.dtype = (value,), value.shape, dtype

    def _write(self, out: Tensor, region: Region) -> None:
        if out.dtype == self.dtype:
            self.parts[0].write_to(out, region)
        else:  # rounded to both
            out.copy_(read(self, region))


def cast(value: StoredValue, dtype: torch.dtype) -> StoredValue:
    """Return the value in another dtype. A cast that lost nothing before this one is left out."""
    if isinstance(value, Cast) and value.dtype in _WIDENINGS.get(value.parts[0].dtype, ()):
        value = value.parts[0]
    return value if value.dtype == dtype else Cast(value, dtype)


class Computed(StoredValue):
    """Result ``index`` (None: the only one) of an ``operation`` on whole tensors: of torch, or ``module:function``."""

    def __init__(self, operation: str, arguments: tuple[Any, ...], index: int | None, like: Tensor) -> None:
        self.operation, self.arguments, self.index = operation, arguments, index
        self.shape, self.dtype = tuple(like.shape), like.dtype
        leaves = tree_leaves(arguments, is_leaf=_is_value)
        self.parts = tuple(leaf for leaf in leaves if isinstance(leaf, StoredValue))

    def _write(self, out: Tensor, region: Region) -> None:
        args, kwargs = tree_map_only(StoredValue, read, self.arguments, is_leaf=_is_value)
        module, _, name = self.operation.rpartition(":")
        found = attrgetter(name)(importlib.import_module(module) if module else torch.ops)(*args, **kwargs)
        out.copy_((found if self.index is None else found[self.index])[region])


def _is_value(entry: Any) -> bool:
    return isinstance(entry, StoredValue)


def _with(entries: tuple[Any, ...], dim: int, entry: Any) -> tuple[Any, ...]:
    return (*entries[:dim], entry, *entries[dim + 1 :])
