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
_STANDALONE_AXES = ("dp", "loss", "cp", "sp", "sequence", "data", "stage", "pp_loss")


def device_meshes(shape: MeshShape, device_type: str) -> dict[str, DeviceMesh]:
    """Create all process groups of this rank, and return axis (or product of axes) -> mesh; all ranks must call it.

    The meshes ``fsdp`` and ``ep_fsdp`` have a first axis ``dp_replicate`` if there are several copies.
    """
    groups = _Groups(shape)

    def root(dims: tuple[str, ...]) -> DeviceMesh:
        ranks = torch.arange(shape.world_size).reshape([shape.size(dim) for dim in dims])
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


class _Groups(dict[str, dist.ProcessGroup]):
    """Axis (or product of axes) -> this rank's process group. Axes with the same ranks share a group, except ``ep``.

    A group runs its CUDA collectives in one order, so in a shared group the all-to-alls of experts would wait for
    FSDP's all-gathers. All ranks must look up the same axes in the same order. Every group also takes CPU tensors,
    even after ``init_process_group("nccl")``.
    """

    def __init__(self, shape: MeshShape) -> None:
        self._shape = shape
        self._created: dict[tuple[tuple[int, ...], bytes], dist.ProcessGroup] = {}
        self._backend: str | None = None
        assert dist.group.WORLD is not None
        configured = dist.get_backend_config()
        if "cpu:" in configured:
            self._created[_key(np.arange(shape.world_size)[None])] = dist.group.WORLD
        else:
            self._backend = f"cpu:gloo,{configured}"

    def __missing__(self, axis: str) -> dist.ProcessGroup:
        partition = self._shape.groups(axis)
        key = _key(partition)
        if axis == "ep" and partition.shape[1] > 1:
            return self.setdefault(axis, self._new_group(partition, axis))
        if key not in self._created:
            self._created[key] = self._new_group(partition, axis)
        return self.setdefault(axis, self._created[key])

    def _new_group(self, partition: np.ndarray, axis: str) -> dist.ProcessGroup:
        """Create all groups of the axis, as ``new_group`` requires, and return the one of this rank."""
        groups = [dist.new_group(ranks.tolist(), backend=self._backend, group_desc=axis) for ranks in partition]
        return next(group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER)


def _key(partition: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return partition.shape, partition.tobytes()
