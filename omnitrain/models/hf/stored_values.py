"""Values that lie in safetensors files, and what is done to them: slices, concatenations, casts.

A value is a tree. Its leaves are tensors in files; the inner nodes are the operations that a loader recorded. Nothing
is read until :func:`read` or ``write_to`` asks for a region, and then only what the region needs:

    Concatenated(dim 0) [4, 8]         region rows 3:4
      InFile expert.0 [2, 8]             not read
      InFile expert.1 [2, 8]             row 1

Trees can be pickled, so one rank records how all weights are made of files, and every rank reads its own shards.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from omnitrain.torch_private import tree_leaves, tree_map_only

Region: TypeAlias = tuple[slice, ...]  # of each dim, with a start and a stop

_WIDENINGS = {torch.bfloat16: (torch.float32, torch.float64), torch.float16: (torch.float32, torch.float64)}


class StoredValue(Protocol):
    """A tensor as a tree over files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def parts(self) -> tuple[StoredValue, ...]:
        """The values that it is made of; empty for a leaf."""

    def write_to(self, out: Tensor, region: Region) -> None:
        """Write a region to ``out``, a tensor of the region's shape, on any device. Other dtypes are cast to."""


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


class FileReader:
    """Reads slices of safetensors files. All reads go through one instance, :data:`FILES`.

    Attributes:
        num_bytes: bytes of all slices that were asked for.
        on_read: called after each read; None: nothing is.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.on_read: Callable[[], None] | None = None
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


FILES = FileReader()


@dataclass(frozen=True)
class InFile:
    """A tensor in a file."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts = ()

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        out.copy_(FILES.slice_of(self.file, self.name, region))


@dataclass(frozen=True, eq=False)
class InMemory:
    """A tensor in memory, such as one that was written to after loading."""

    tensor: Tensor
    parts = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """See :attr:`StoredValue.dtype`."""
        return self.tensor.dtype

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        out.copy_(self.tensor[region])


@dataclass(frozen=True)
class _OfOne:
    """What is made of one other value; its dtype is that of the value unless it says otherwise."""

    value: StoredValue

    @property
    def dtype(self) -> torch.dtype:
        """See :attr:`StoredValue.dtype`."""
        return self.value.dtype

    @property
    def parts(self) -> tuple[StoredValue, ...]:
        """See :attr:`StoredValue.parts`."""
        return (self.value,)


@dataclass(frozen=True)
class Narrowed(_OfOne):
    """``length`` entries of a dim, from ``start``."""

    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return _with(self.value.shape, self.dim, self.length)

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        asked = region[self.dim]
        shifted = slice(asked.start + self.start, asked.stop + self.start)
        self.value.write_to(out, _with(region, self.dim, shifted))


@dataclass(frozen=True)
class Selected(_OfOne):
    """One entry of a dim; the dim is gone."""

    dim: int
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return _without(self.value.shape, self.dim)

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        one = slice(self.index, self.index + 1)
        self.value.write_to(out.unsqueeze(self.dim), (*region[: self.dim], one, *region[self.dim :]))


@dataclass(frozen=True)
class Unsqueezed(_OfOne):
    """The same with a new dim of size 1."""

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return (*self.value.shape[: self.dim], 1, *self.value.shape[self.dim :])

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        if sizes_of(region)[self.dim]:
            self.value.write_to(out.squeeze(self.dim), _without(region, self.dim))


@dataclass(frozen=True)
class Concatenated:
    """Several values end to end along a dim."""

    parts: tuple[StoredValue, ...]
    dim: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return _with(self.parts[0].shape, self.dim, sum(part.shape[self.dim] for part in self.parts))

    @property
    def dtype(self) -> torch.dtype:
        """See :attr:`StoredValue.dtype`."""
        return self.parts[0].dtype

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        asked, offset = region[self.dim], 0
        for part in self.parts:
            size = part.shape[self.dim]
            start, stop = max(asked.start, offset), min(asked.stop, offset + size)
            if start < stop:
                there = out.narrow(self.dim, start - asked.start, stop - start)
                part.write_to(there, _with(region, self.dim, slice(start - offset, stop - offset)))
            offset += size


@dataclass(frozen=True)
class Permuted(_OfOne):
    """Its dim ``i`` is dim ``dims[i]`` of the value."""

    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return tuple(self.value.shape[dim] for dim in self.dims)

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        back = [self.dims.index(dim) for dim in range(len(self.dims))]
        self.value.write_to(out.permute(back), tuple(region[dim] for dim in back))


@dataclass(frozen=True)
class Reshaped(_OfOne):
    """The same elements in another shape. Rows of the value that hold none of the region are not read."""

    shape: tuple[int, ...]

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        if not out.numel():
            return
        rows, of_row = region[:1] or (slice(0, 1),), math.prod(self.shape[1:])
        first, last = rows[0].start * of_row, rows[0].stop * of_row  # elements of these rows
        of_source_row = math.prod(self.value.shape[1:])
        start, stop = first // of_source_row, -(-last // of_source_row)
        source = whole_of(self.value.shape)
        found = read(self.value, (slice(start, stop), *source[1:]) if source else source)
        flat = found.reshape(-1)[first - start * of_source_row : last - start * of_source_row]
        out.copy_(flat.view(*sizes_of(rows), *self.shape[1:])[(slice(None), *region[1:])].view(out.shape))


@dataclass(frozen=True)
class Cast(_OfOne):
    """The same in another dtype."""

    to: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """See :attr:`StoredValue.dtype`."""
        return self.to

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredValue.shape`."""
        return self.value.shape

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        if out.dtype == self.dtype:
            self.value.write_to(out, region)
        else:  # rounded to both
            out.copy_(read(self, region))


def cast(value: StoredValue, dtype: torch.dtype) -> StoredValue:
    """Return the value in another dtype. A cast that lost nothing before this one is left out."""
    if isinstance(value, Cast) and value.dtype in _WIDENINGS.get(value.value.dtype, ()):
        value = value.value
    return value if value.dtype == dtype else Cast(value, dtype)


@dataclass(frozen=True)
class Computed:
    """The result of an operation that needs whole tensors.

    Attributes:
        operation: its name in torch, such as ``aten.mul.Tensor``, or that of any function: ``module:function``.
        arguments: its arguments and keyword arguments, values in the place of tensors.
        index: which of its results; None: it has one.
    """

    operation: str
    arguments: tuple[Any, ...]
    index: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def parts(self) -> tuple[StoredValue, ...]:
        """See :attr:`StoredValue.parts`."""
        return tuple(leaf for leaf in tree_leaves(self.arguments, is_leaf=_is_value) if _is_value(leaf))

    def write_to(self, out: Tensor, region: Region) -> None:
        """See :meth:`StoredValue.write_to`."""
        args, kwargs = tree_map_only(_KINDS, read, self.arguments, is_leaf=_is_value)
        module, _, name = self.operation.rpartition(":")
        found = attrgetter(name)(importlib.import_module(module) if module else torch.ops)(*args, **kwargs)
        out.copy_((found if self.index is None else found[self.index])[region])


_KINDS = (
    InFile,
    InMemory,
    Narrowed,
    Selected,
    Unsqueezed,
    Concatenated,
    Permuted,
    Reshaped,
    Cast,
    Computed,
)


def _is_value(entry: Any) -> bool:
    return isinstance(entry, _KINDS)


def _with(entries: tuple[Any, ...], dim: int, entry: Any) -> tuple[Any, ...]:
    return (*entries[:dim], entry, *entries[dim + 1 :])


def _without(entries: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*entries[:dim], *entries[dim + 1 :])
