"""The part of each tensor that a rank writes, and where it lies in the whole tensor, under any layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from omnitrain.peers import Peers
from omnitrain.torch_private import part_of_rank


@dataclass(frozen=True)
class TensorChunk:
    """Where a piece lies in the tensor of that name and shape: from ``offsets`` on, with ``sizes``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the piece."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the whole tensor."""
        return self.sizes == self.shape

    def within(self, whole: Tensor) -> Tensor:
        """Return the piece as a view of the whole tensor."""
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))]


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor: where it lies, and its values ``[*place.sizes]``."""

    place: TensorChunk
    tensor: Tensor

    def on_host(self) -> Piece:
        """Return the piece contiguous in the memory of the CPU, without a copy if it is there."""
        return Piece(self.place, self.tensor.cpu().contiguous())


class PieceOwners:
    """Which ranks write which tensors, one of equal copies. All ``peers`` make one; absent ``values`` are on meta."""

    def __init__(self, values: Mapping[str, Tensor], peers: Peers) -> None:
        self._rank = peers.rank
        first = torch.tensor([peers.size if value.is_meta else peers.rank for value in values.values()])
        if peers.size > 1:
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=peers.group)
        self._first = dict(zip(values, first.tolist(), strict=True))
        self._ranks: dict[DeviceMesh, frozenset[int]] = {}

    def piece(self, name: str, value: Tensor, number: int, like: Tensor | None = None, owner: str = "") -> Piece | None:
        """Return the piece of a tensor that this rank writes; None: it writes none of it.

        A sharded tensor is written by the ranks of the mesh of its first holder, any other by its first holder; of
        replicas, ``number`` (equal on all ranks that hold it) chooses one, so that they share the work. A tensor of the
        optimizer belongs to the parameter ``like`` of the name ``owner``.
        """
        holder, whole = self._first[owner or name], tuple(value.shape)
        if value.is_meta:
            return None
        if not isinstance(value, DTensor):
            if not self.writes(owner or name, value if like is None else like):
                return None
            return Piece(TensorChunk(name, value.dtype, whole, (0,) * value.dim(), whole), value.detach())
        sizes, offsets = self._part(value, holder, number)
        if 0 in sizes:
            return None
        return Piece(TensorChunk(name, value.dtype, whole, offsets, sizes), value.to_local().detach())

    def writes(self, name: str, value: Tensor) -> bool:
        """Whether this rank writes what is equal on all ranks that hold the parameter ``value``, such as a number."""
        if not isinstance(value, DTensor):
            return self._first[name] == self._rank
        ranks = self._ranks_of(value.device_mesh)
        return self._first[name] in ranks and min(ranks) == self._rank

    def _ranks_of(self, mesh: DeviceMesh) -> frozenset[int]:
        if mesh not in self._ranks:
            self._ranks[mesh] = frozenset(mesh.mesh.flatten().tolist())
        return self._ranks[mesh]

    def _part(self, value: DTensor, holder: int, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes and offsets of this rank's part; a size of 0: another rank writes it."""
        mesh, coordinate = value.device_mesh, value.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank has a tensor of a mesh that it is not in"
        copies, copy = 1, 0
        for axis, placement in enumerate(value.placements):
            assert not placement.is_partial(), "a tensor at rest is no partial sum"
            if placement.is_replicate():
                copies, copy = copies * mesh.size(axis), copy * mesh.size(axis) + coordinate[axis]
        if holder not in self._ranks_of(mesh) or copy != number % copies:
            return (0,), (0,)
        sizes, offsets = part_of_rank(value.shape, mesh, value.placements)
        return tuple(sizes), tuple(offsets)
