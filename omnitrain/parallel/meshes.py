"""Process groups and device meshes of one factorisation of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnitrain.groups import shared_group
from omnitrain.plan.mesh import MeshShape

# FSDP can only combine meshes that are submeshes of one root, so all meshes of a parameter come from the same root.
_DENSE_ROOT = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERT_ROOT = ("pp", "dp_replicate", "ep_fsdp", "ep", "tp")
_STANDALONE_AXES = ("dp", "loss", "cp", "sp", "sequence", "data", "stage", "pp_loss", "all")


def device_meshes(shape: MeshShape, device_type: str, first_rank: int = 0) -> dict[str, DeviceMesh]:
    """Create process groups, and return axis (or product of axes) -> mesh; empty on ranks that ``shape`` does not have.

    All ranks of the run must call it. The meshes ``fsdp`` and ``ep_fsdp`` have a first axis ``dp_replicate`` if there
    are several copies. ``first_rank``: global rank of the first rank of ``shape``; the others follow.
    """
    groups = _Groups(shape, first_rank, (*_DENSE_ROOT, *_EXPERT_ROOT, *_STANDALONE_AXES))
    if not groups.has_this_rank:
        return {}
    dense, expert = groups.mesh(_DENSE_ROOT, device_type), groups.mesh(_EXPERT_ROOT, device_type)
    copies = ("dp_replicate",) * (shape.dp_replicate > 1)
    meshes = {"fsdp": dense[*copies, "fsdp"], "ep_fsdp": expert[*copies, "ep_fsdp"]}
    meshes |= {"ep": expert["ep"], "tp": dense["tp"], "pp": dense["pp"]}
    for dim in _STANDALONE_AXES:
        meshes[dim] = DeviceMesh.from_group(groups.of_axis[dim], device_type, mesh_dim_names=(dim,))
    return meshes


def data_mesh(shape: MeshShape, device_type: str, first_rank: int = 0) -> DeviceMesh | None:
    """Create only the mesh ``fsdp`` of :func:`device_meshes`, for a component with degrees of its own.

    Its root also has the axes ``pp`` and ``tp``, whose ranks shard their parameters over ranks of their own. All ranks
    of the run must call it; it is None on ranks that ``shape`` does not have.
    """
    groups = _Groups(shape, first_rank, _DENSE_ROOT)
    if not groups.has_this_rank:
        return None
    root = groups.mesh(_DENSE_ROOT, device_type)
    return root["dp_replicate", "fsdp"] if shape.dp_replicate > 1 else root["fsdp"]


def mesh_group(ranks: Sequence[int], name: str, *, is_of_experts: bool = False) -> dist.ProcessGroup | None:
    """Return the group of some ranks that meshes share, also for CPU tensors; None elsewhere. All ranks call it."""
    configured = dist.get_backend_config()
    backend = None if "cpu:" in configured else f"cpu:gloo,{configured}"
    use = "experts" if is_of_experts else "mesh"
    return shared_group(use, ranks, name, backend=backend, high_priority=is_of_experts)


class _Groups:
    """The process groups of some axes (or products of axes). Axes with the same ranks share a group, except ``ep``.

    A group runs its CUDA collectives in one order, so in a shared group the all-to-alls of experts would wait for
    FSDP's all-gathers. They also run in streams of high priority: a layer's computation waits for them, and kernels
    that fill the GPU, such as those of a forward beside a backward, would start first. Every group also takes CPU
    tensors, even after ``init_process_group("nccl")``.
    """

    def __init__(self, shape: MeshShape, first_rank: int, axes: Sequence[str]) -> None:
        self._shape, self._first_rank = shape, first_rank
        self.has_this_rank = first_rank <= dist.get_rank() < first_rank + shape.world_size
        partitions = {axis: shape.groups(axis) + first_rank for axis in dict.fromkeys(axes)}
        found = {axis: _own_group(axis, partition.tolist()) for axis, partition in partitions.items()}
        self.of_axis = {axis: group for axis, group in found.items() if group is not None}

    def mesh(self, dims: Sequence[str], device_type: str) -> DeviceMesh:
        """Return the mesh of all ranks of the shape, with these axes."""
        ranks = torch.arange(self._shape.world_size).reshape([self._shape.size(dim) for dim in dims])
        groups = [self.of_axis[dim] for dim in dims]
        return DeviceMesh.from_group(groups, device_type, ranks + self._first_rank, mesh_dim_names=tuple(dims))


def _own_group(axis: str, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create all groups of an axis where none is shared, and return the one of this rank."""
    is_of_experts = axis == "ep" and len(partition[0]) > 1
    if "cpu:" in dist.get_backend_config() and not is_of_experts and len(partition[0]) == dist.get_world_size():
        return dist.group.WORLD
    groups = [mesh_group(ranks, axis, is_of_experts=is_of_experts) for ranks in partition]
    return next((group for group in groups if group is not None), None)
