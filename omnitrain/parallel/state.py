"""Process groups and device meshes of one factorisation of the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnitrain.errors import UserError
from omnitrain.plan.mesh import MeshShape, fit_mesh
from omnitrain.recipe.parallel import FOUNDATION, ParallelPlan

DpMode = Literal["fsdp2", "hsdp", "replicate"]

# Meshes for the same parameter are cut from one root, or FSDP could not put them together.
_DENSE_ROOT = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERT_ROOT = ("pp", "dp_replicate", "ep_fsdp", "ep", "tp")
_ALONE = ("dp", "loss", "cp", "sp", "sequence")


@dataclass(frozen=True, eq=False)
class ParallelState:
    """Who this rank is under one factorisation of all ranks, and the meshes and groups to talk to the others.

    Several states can live over the same ranks at once. Sizes and places of any axis or product of axes (see
    :class:`~omnitrain.plan.mesh.MeshShape`) come from :meth:`size` and :meth:`place`; the properties have what is used
    most. A mesh over more than one axis is there where it has a use: of ``dp_replicate`` with ``fsdp`` or ``ep_fsdp``.

    Attributes:
        shape: the factorisation.
        rank: of this process.
        device_type: of the tensors that the meshes are for: ``cpu`` or ``cuda``.
        dp_mode: what data-parallel ranks do with parameters unless a component's plan says otherwise: ``fsdp2`` and
            ``hsdp`` shard them over ``fsdp_mesh``, ``replicate`` keeps a copy on each rank of ``loss_mesh``.
    """

    shape: MeshShape
    rank: int
    device_type: str
    dp_mode: DpMode
    _meshes: Mapping[str, DeviceMesh] = field(repr=False)

    def size(self, *axes: str) -> int:
        """Ranks along the product of ``axes``."""
        return self.shape.size(*axes)

    def place(self, *axes: str) -> int:
        """This rank's place along the product of ``axes``."""
        return self.shape.place(self.rank, *axes)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.shape.world_size

    @property
    def dp_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return self.size("dp")

    @property
    def dp_rank(self) -> int:
        """Which of them this one is."""
        return self.place("dp")

    @property
    def sp_rank(self) -> int:
        """Place among the ranks of ``sp_group``."""
        return self.place("sp")

    @property
    def cp_rank(self) -> int:
        """Place among the ranks of ``cp_group``."""
        return self.place("cp")

    @property
    def tp_rank(self) -> int:
        """Place among the ranks of ``tp_mesh``."""
        return self.place("tp")

    @property
    def ep_rank(self) -> int:
        """Place among the ranks of ``ep_mesh``."""
        return self.place("ep")

    @property
    def pp_rank(self) -> int:
        """Number of this rank's pipeline stage."""
        return self.place("pp")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What ``fully_shard`` takes: ``[fsdp]``, or ``[dp_replicate, fsdp]`` where there are several copies."""
        return self._meshes["fsdp"]

    @property
    def ep_fsdp_mesh(self) -> DeviceMesh:
        """What ``fully_shard`` takes for experts that are sharded over ``ep_mesh``: like ``fsdp_mesh``."""
        return self._meshes["ep_fsdp"]

    @property
    def ep_mesh(self) -> DeviceMesh:
        """``[ep]``: ranks that share one copy of the experts."""
        return self._meshes["ep"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """``[tp]``: ranks that share every layer's matrices."""
        return self._meshes["tp"]

    @property
    def pp_mesh(self) -> DeviceMesh:
        """``[pp]``: one rank of each pipeline stage."""
        return self._meshes["pp"]

    @property
    def dp_mesh(self) -> DeviceMesh:
        """``[dp]``: one rank of each that has samples of its own."""
        return self._meshes["dp"]

    @property
    def loss_mesh(self) -> DeviceMesh:
        """``[loss]``: dp x cp x sp, the ranks over which loss sums and counts add up."""
        return self._meshes["loss"]

    @property
    def sp_group(self) -> dist.ProcessGroup:
        """Ranks that share a sequence and exchange it for heads in attention (Ulysses)."""
        return self._meshes["sp"].get_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Ranks that share a sequence and attend around a ring."""
        return self._meshes["cp"].get_group()

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        """Ranks that share a sequence, in either way: cp x sp."""
        return self._meshes["sequence"].get_group()

    @property
    def loss_ranks(self) -> tuple[int, ...]:
        """The ranks of ``loss_group``, ascending: those that have other rows than this one. A step is planned by them.

        With tensor parallelism there are as many such groups as it has ranks, and all do the same.
        """
        return tuple(self.shape.group(self.rank, "loss").tolist())

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """The group of ``loss_mesh``."""
        return self._meshes["loss"].get_group()


_DEGREE_ARGUMENTS = {axis: f"{axis}_size" for axis in ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
_DEGREE_ARGUMENTS["sp"] = "ulysses_size"

_default: ParallelState | None = None


def init_parallel_state(
    dp_size: int | None = None,
    dp_replicate_size: int | None = 1,
    dp_shard_size: int | None = None,
    tp_size: int = 1,
    ep_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    ulysses_size: int = 1,
    dp_mode: DpMode = "fsdp2",
) -> ParallelState:
    """Factorise all ranks, and make the result the default that :func:`get_parallel_state` returns.

    Every rank must call it, with the same degrees. Where no process group exists it is made: from the environment of
    ``torchrun``, or of this process alone. States made earlier stay valid.

    Args:
        dp_size: ranks with samples of their own; None: those that the other degrees leave.
        dp_replicate_size: copies of the parameters; None: inferred.
        dp_shard_size: data-parallel ranks that share one copy; None: inferred.
        tp_size: tensor parallel ranks.
        ep_size: expert parallel ranks; divides dp_shard x cp x ulysses.
        pp_size: pipeline stages.
        cp_size: ranks that share a sequence around a ring.
        ulysses_size: ranks that share a sequence and exchange it for heads: the axis ``sp``.
        dp_mode: ``fsdp2``: one copy of the parameters, unless ``dp_replicate_size`` says otherwise; ``hsdp``: several
            copies, one of the two degrees is given; ``replicate``: a copy on each, ``dp_shard_size`` is 1.

    Raises:
        UserError: degrees that do not fit the ranks, with those that would.
    """
    sizes = {"pp": pp_size, "cp": cp_size, "sp": ulysses_size, "tp": tp_size, "ep": ep_size}
    data = _data_degrees(dp_mode, dp_replicate_size, dp_shard_size, _DEGREE_ARGUMENTS)
    global _default
    _ensure_process_group()
    shape = fit_mesh(dist.get_world_size(), dp=dp_size, **data, **sizes, keys=_DEGREE_ARGUMENTS)
    _default = _state(shape, dp_mode)
    return _default


def init_state_of(plan: ParallelPlan) -> ParallelState:
    """:func:`init_parallel_state` with the degrees that a plan has for the foundation.

    Raises:
        UserError: degrees that do not fit the ranks, with those that would.
    """
    global _default
    mode, degrees = _degrees_of(plan)
    _ensure_process_group()
    _default = _state(fit_mesh(dist.get_world_size(), **degrees), mode)
    return _default


def state_without_groups(plan: ParallelPlan, world_size: int) -> ParallelState:
    """What :func:`init_state_of` makes on so many ranks, to try a plan with: no rank can talk to another in it.

    Raises:
        UserError: degrees that do not fit the ranks, with those that would.
    """
    mode, degrees = _degrees_of(plan)
    return ParallelState(fit_mesh(world_size, **degrees), 0, "cpu", mode, {})


def _degrees_of(plan: ParallelPlan) -> tuple[DpMode, dict[str, Any]]:
    own = plan.of(FOUNDATION)
    replicate = own.dp_replicate or (None if own.mode == "replicate" else 1)
    sizes = {"pp": own.pp or 1, "cp": own.cp or 1, "sp": own.ulysses or 1, "tp": own.tp or 1, "ep": own.ep or 1}
    mode, keys = own.mode or "fsdp2", {"sp": "ulysses"}
    return mode, {**_data_degrees(mode, replicate, own.dp_shard, keys), **sizes, "keys": keys}


def _data_degrees(mode: DpMode, replicate: int | None, shard: int | None, keys: Mapping[str, str]) -> dict[str, Any]:
    """Copies and shards as :func:`fit_mesh` takes them; ``keys``: axis -> what the user calls its degree."""
    copies, parts = keys.get("dp_replicate", "dp_replicate"), keys.get("dp_shard", "dp_shard")
    if mode not in get_args(DpMode):
        raise UserError(f"dp_mode is {mode!r}; expected one of {', '.join(get_args(DpMode))}")
    if mode == "replicate":
        if shard not in (None, 1):
            raise UserError(f"dp_mode is replicate, which shards nothing; {parts} is {shard}, expected 1")
        shard = 1
    if mode == "hsdp" and shard is None and replicate in (None, 1):
        raise UserError(f"dp_mode is hsdp, which has several copies; expected {copies} above 1 or {parts}")
    if mode != "fsdp2" and replicate == 1:
        replicate = None
    return {"dp_replicate": replicate, "dp_shard": shard}


def get_parallel_state() -> ParallelState:
    """The state of the last :func:`init_parallel_state`.

    Raises:
        UserError: there was none.
    """
    if _default is None:
        raise UserError("there is no parallel state yet; call omnitrain.init_parallel_state() first")
    return _default


def forget_parallel_state() -> None:
    """After this there is no default; to be called when the process groups end."""
    global _default
    _default = None


def _ensure_process_group() -> None:
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        if "LOCAL_RANK" in os.environ:  # a process alone may have chosen another one
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _state(shape: MeshShape, dp_mode: DpMode) -> ParallelState:
    device_type = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
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
    for dim in _ALONE:
        meshes[dim] = DeviceMesh.from_group(groups[dim], device_type, mesh_dim_names=(dim,))
    return ParallelState(shape, dist.get_rank(), device_type, dp_mode, meshes)


class _Groups(dict[str, dist.ProcessGroup]):
    """This rank's process group by axis or product; axes with the same groups share one, but for those of experts.

    What a group does on CUDA it does in one order: rows of experts would queue behind the gathering of parameters.
    All ranks must ask for the same axes in the same order. Groups take tensors on the CPU, too, also where the user's
    own process group does not (``init_process_group("nccl")``).
    """

    def __init__(self, shape: MeshShape) -> None:
        self._shape = shape
        self._made: dict[tuple[tuple[int, ...], bytes], dist.ProcessGroup] = {}
        self._backend: str | None = None
        assert dist.group.WORLD is not None
        configured = dist.get_backend_config()
        if "cpu:" in configured:
            self._made[_key(np.arange(shape.world_size)[None])] = dist.group.WORLD
        else:
            self._backend = f"cpu:gloo,{configured}"

    def __missing__(self, axis: str) -> dist.ProcessGroup:
        partition = self._shape.groups(axis)
        key = _key(partition)
        if axis == "ep" and partition.shape[1] > 1:
            return self.setdefault(axis, self._own_group(partition, axis))
        if key not in self._made:
            self._made[key] = self._own_group(partition, axis)
        return self.setdefault(axis, self._made[key])

    def _own_group(self, partition: np.ndarray, axis: str) -> dist.ProcessGroup:
        """Every rank takes part in making every group, which costs next to nothing where it is not a member."""
        made = [dist.new_group(ranks.tolist(), backend=self._backend, group_desc=axis) for ranks in partition]
        return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)


def _key(partition: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return partition.shape, partition.tobytes()
