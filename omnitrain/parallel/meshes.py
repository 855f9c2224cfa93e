"""Process groups and device meshes of one factorisation of the ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnitrain.plan.mesh import MeshShape

# FSDP can only combine meshes that are submeshes of one root, so all meshes of a parameter come from the same root.
_DENSE_ROOT = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERT_ROOT = ("pp", "dp_replicate", "ep_fsdp", "ep", "tp")
_STANDALONE_AXES = ("dp", "loss", "cp", "sp", "sequence", "data", "stage", "pp_loss", "all")


def device_meshes(shape: MeshShape, device_type: str, first_rank: int = 0) -> dict[str, DeviceMesh]:
    """Create the process groups of this rank, and return axis (or product of axes) -> mesh.

    All ranks of ``shape`` must call it. The meshes ``fsdp`` and ``ep_fsdp`` have a first axis ``dp_replicate`` if there
    are several copies.

    Args:
        shape: the factorisation of the ranks.
        device_type: ``cpu`` or ``cuda``.
        first_rank: global rank of the first rank of ``shape``; the others follow.
    """
    groups = _Groups(shape, first_rank)

    def root(dims: tuple[str, ...]) -> DeviceMesh:
        ranks = torch.arange(shape.world_size).reshape([shape.size(dim) for dim in dims]) + first_rank
        return DeviceMesh.from_group([groups[dim] for dim in dims], device_type, ranks, mesh_dim_names=dims)

    dense, expert = root(_DENSE_ROOT), root(_EXPERT_ROOT)
    has_copies = shape.dp_replicate > 1
    meshes = {
        "fsdp": dense["dp_replicate", "fsdp"] if has_copies else dense["fsdp"],
        "ep_fsdp": expert["dp_replicate", "ep_fsdp"] if has_copies else expert["ep_fsdp"],
        "ep": expert["ep"],
        "tp": dense["tp"],
        "pp": dense["pp"],
    }
    for dim in _STANDALONE_AXES:
        meshes[dim] = DeviceMesh.from_group(groups[dim], device_type, mesh_dim_names=(dim,))
    return meshes


def data_mesh(shape: MeshShape, device_type: str, first_rank: int = 0) -> DeviceMesh:
    """Create only the mesh ``fsdp`` of :func:`device_meshes`, for a component with degrees of its own.

    Its root also has the axes ``pp`` and ``tp``, so each pipeline stage, and each tensor parallel rank in it, shards
    its parameters over ranks of its own.
    """
    groups = _Groups(shape, first_rank)
    ranks = torch.arange(shape.world_size).reshape([shape.size(dim) for dim in _DENSE_ROOT]) + first_rank
    root = DeviceMesh.from_group([groups[dim] for dim in _DENSE_ROOT], device_type, ranks, mesh_dim_names=_DENSE_ROOT)
    return root["dp_replicate", "fsdp"] if shape.dp_replicate > 1 else root["fsdp"]


class _Groups(dict[str, dist.ProcessGroup]):
    """Axis (or product of axes) -> this rank's process group. Axes with the same ranks share a group, except ``ep``.

    A group runs its CUDA collectives in one order, so in a shared group the all-to-alls of experts would wait for
    FSDP's all-gathers. All ranks must look up the same axes in the same order. Every group also takes CPU tensors,
    even after ``init_process_group("nccl")``.
    """

    def __init__(self, shape: MeshShape, first_rank: int) -> None:
        self._shape, self._first_rank = shape, first_rank
        self._created: dict[tuple[tuple[int, ...], bytes], dist.ProcessGroup] = {}
        self._backend: str | None = None
        assert dist.group.WORLD is not None
        configured = dist.get_backend_config()
        if "cpu:" not in configured:
            self._backend = f"cpu:gloo,{configured}"
        elif shape.world_size == dist.get_world_size():
            self._created[_key(np.arange(shape.world_size)[None])] = dist.group.WORLD

    def __missing__(self, axis: str) -> dist.ProcessGroup:
        partition = self._shape.groups(axis)
        key = _key(partition)
        if axis == "ep" and partition.shape[1] > 1:
            return self.setdefault(axis, self._new_group(partition, axis))
        if key not in self._created:
            self._created[key] = self._new_group(partition, axis)
        return self.setdefault(axis, self._created[key])

    def _new_group(self, partition: np.ndarray, axis: str) -> dist.ProcessGroup:
        """Create this rank's group of the axis."""
        own = next(row for row in (partition + self._first_rank).tolist() if dist.get_rank() in row)
        return dist.new_group(own, backend=self._backend, group_desc=axis, use_local_synchronization=True)


def _key(partition: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return partition.shape, partition.tobytes()
