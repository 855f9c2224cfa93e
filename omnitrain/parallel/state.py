"""``ParallelState``: this rank's coordinates in one factorisation of the ranks."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omnitrain.errors import UserError
from omnitrain.parallel.environment import gpu_of_rank, prepare_process
from omnitrain.parallel.join import join_process_group
from omnitrain.parallel.meshes import device_meshes
from omnitrain.plan.mesh import MeshShape, fit_mesh
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan
from omnitrain.torch_private import forget_meshes, forget_shardings

DpMode = Literal["fsdp2", "hsdp", "replicate"]
V = TypeVar("V")


class _Of(Generic[V]):
    """A property that says what a method of the state says of one axis, or product of axes."""

    def __init__(self, method: Callable[..., V], axis: str) -> None:
        self._method, self._axis = method, axis

    def __get__(self, state: ParallelState | None, owner: type | None = None) -> V:
        if state is None:
            raise AttributeError(f"{self._axis} of a state, not of its class")
        return self._method(state, self._axis)


@dataclass(frozen=True, eq=False)
class ParallelState:
    """The coordinates of this rank in one factorisation of the ranks, with its meshes and process groups.

    Components with ranks of their own (:class:`~omnitrain.recipe.parallel.Section`) have a factorisation of their own;
    then a state is that of this rank's section, and its sizes and groups are those of the section. Several states can
    use the same ranks at once. :meth:`size` and :meth:`rank_in` take any axis or product of axes
    (see :class:`~omnitrain.plan.mesh.MeshShape`). The properties cover the common ones: ``sp_size`` is ``size("sp")``,
    ``sp_enabled`` whether that is above 1, ``tp_rank`` this process's rank on an axis, ``sp_group`` its group and
    ``sp_mesh`` its mesh. ``ulysses`` is another name of ``sp``. Meshes with two axes exist only for FSDP:
    ``dp_replicate`` with ``fsdp`` or ``ep_fsdp``.

    Attributes:
        shape: the factorisation.
        rank: global rank of this process.
        device_type: device type of the meshes: ``cpu`` or ``cuda``.
        dp_mode: how data-parallel ranks hold parameters unless a component's plan sets ``mode``: ``fsdp2`` and
            ``hsdp`` shard them over ``fsdp_mesh``, ``replicate`` keeps a copy on each rank of ``loss_group``.
        section: name of the section that has this rank.
        first_rank: global rank of the section's first rank; the others follow.
        sections: section -> its state without process groups, in the order of ranks; empty: all ranks are ``main``.
    """

    shape: MeshShape
    rank: int
    device_type: str
    dp_mode: DpMode
    _meshes: Mapping[str, DeviceMesh] = field(repr=False)
    section: str = MAIN
    first_rank: int = 0
    sections: Mapping[str, ParallelState] = field(default_factory=dict, repr=False)

    def size(self, *axes: str) -> int:
        """Return the number of ranks along the product of ``axes``."""
        return self.shape.size(*axes)

    def rank_in(self, *axes: str) -> int:
        """Return this process's rank along the product of ``axes``, from 0."""
        return self.shape.rank_in(self.rank - self.first_rank, *axes)

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks that differ from this one only on ``axes``, ascending; this rank is one of them."""
        return tuple((self.shape.group(self.rank - self.first_rank, *axes) + self.first_rank).tolist())

    def groups(self, *axes: str) -> np.ndarray:
        """Return ``[number of groups, size of each]`` int64: :meth:`ranks_along` of all ranks of the section."""
        return self.shape.groups(*axes) + self.first_rank

    def all_groups(self, *axes: str) -> list[list[int]]:
        """Return :meth:`groups` of all sections: each rank of the run is in one group."""
        states = self.sections.values() or [self]
        return [ranks for state in states for ranks in state.groups(*axes).tolist()]

    def of_section(self, section: str) -> ParallelState:
        """Return the state of a section; another one's has no process groups."""
        return self if section == self.section else self.sections[section]

    def with_tp(self, tp: int) -> ParallelState:
        """Return the state, without process groups, of a component whose matrices only ``tp`` of the tp ranks share.

        Its copies hold the same samples, like ranks that share a sequence, and are ranks of ``sp``: groups of
        ``sequence``, ``fsdp`` and ``loss`` have one rank of each copy.
        """
        copies = self.shape.tp // tp
        return replace(self, shape=replace(self.shape, sp=self.shape.sp * copies, tp=tp, ep=1), _meshes={})

    def degrees(self, axis: str) -> dict[str, int]:
        """Return section -> number of its ranks along ``axis``."""
        return {name: state.size(axis) for name, state in (self.sections or {MAIN: self}).items()}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the section, ascending."""
        return tuple(range(self.first_rank, self.first_rank + self.world_size))

    @property
    def world_size(self) -> int:
        """The number of ranks of the section; without sections, of all ranks."""
        return self.shape.world_size

    @property
    def num_ranks(self) -> int:
        """The number of all ranks, over all sections."""
        return sum(state.world_size for state in self.sections.values()) or self.world_size

    def is_enabled(self, axis: str) -> bool:
        """Return whether there are several ranks along an axis."""
        return self.size(axis) > 1

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of this process on an axis, or on a product of axes that has one."""
        return self._meshes[axis].get_group()

    def mesh(self, axis: str) -> DeviceMesh:
        """Return the mesh of an axis; of ``fsdp`` and ``ep_fsdp`` for ``fully_shard``: ``[dp_replicate, fsdp]``."""
        return self._meshes[axis]

    dp_size = _Of(size, "dp")
    dp_replicate_size = _Of(size, "dp_replicate")
    dp_shard_size = _Of(size, "dp_shard")
    fsdp_size = _Of(size, "fsdp")
    ep_size = _Of(size, "ep")
    tp_size = _Of(size, "tp")
    ulysses_size = _Of(size, "sp")
    sp_size = _Of(size, "sp")
    cp_size = _Of(size, "cp")
    sequence_size = _Of(size, "sequence")
    pp_size = _Of(size, "pp")
    dp_rank = _Of(rank_in, "dp")
    dp_replicate_rank = _Of(rank_in, "dp_replicate")
    dp_shard_rank = _Of(rank_in, "dp_shard")
    fsdp_rank = _Of(rank_in, "fsdp")
    ep_rank = _Of(rank_in, "ep")
    tp_rank = _Of(rank_in, "tp")
    ulysses_rank = _Of(rank_in, "sp")
    sp_rank = _Of(rank_in, "sp")
    cp_rank = _Of(rank_in, "cp")
    sequence_rank = _Of(rank_in, "sequence")
    pp_rank = _Of(rank_in, "pp")
    dp_enabled = _Of(is_enabled, "dp")
    fsdp_enabled = _Of(is_enabled, "fsdp")
    ep_enabled = _Of(is_enabled, "ep")
    tp_enabled = _Of(is_enabled, "tp")
    ulysses_enabled = _Of(is_enabled, "sp")
    sp_enabled = _Of(is_enabled, "sp")
    cp_enabled = _Of(is_enabled, "cp")
    sequence_enabled = _Of(is_enabled, "sequence")
    pp_enabled = _Of(is_enabled, "pp")
    dp_mesh = _Of(mesh, "dp")
    fsdp_mesh = _Of(mesh, "fsdp")
    ep_fsdp_mesh = _Of(mesh, "ep_fsdp")
    ep_mesh = _Of(mesh, "ep")
    tp_mesh = _Of(mesh, "tp")
    pp_mesh = _Of(mesh, "pp")
    dp_group = _Of(group, "dp")
    ep_group = _Of(group, "ep")
    tp_group = _Of(group, "tp")
    pp_group = _Of(group, "pp")
    ulysses_group = _Of(group, "sp")
    sp_group = _Of(group, "sp")
    cp_group = _Of(group, "cp")
    sequence_group = _Of(group, "sequence")
    loss_group = _Of(group, "loss")
    data_group = _Of(group, "data")
    stage_group = _Of(group, "stage")
    section_group = _Of(group, "all")
    stage_ranks = _Of(ranks_along, "stage")


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
    sections: ParallelPlan | None = None,
) -> ParallelState:
    """Factorise all ranks, and make the result the default that :func:`get_parallel_state` returns.

    Every rank must call this with the same degrees. If no process group is initialized, this initializes one from the
    environment of ``torchrun``, or for this process alone. Earlier states stay valid.

    Args:
        dp_size: data-parallel ranks, which read different samples. None: inferred from the other degrees.
        dp_replicate_size: copies of the parameters. None: inferred.
        dp_shard_size: data-parallel ranks that share one copy. None: inferred.
        tp_size: tensor parallel ranks.
        ep_size: expert parallel ranks; must divide dp_shard x cp x ulysses.
        pp_size: pipeline stages.
        cp_size: ranks that share a sequence with ring attention.
        ulysses_size: ranks that share a sequence and exchange it for attention heads: the axis ``sp``.
        dp_mode: ``fsdp2``: one copy of the parameters, unless ``dp_replicate_size`` is set. ``hsdp``: several copies;
            set ``dp_replicate_size`` or ``dp_shard_size``. ``replicate``: a copy on every rank; ``dp_shard_size`` is 1.
        sections: a plan with sections; the other arguments are for the ranks that they leave. None: no sections.

    Raises:
        UserError: the degrees do not fit the number of ranks. The message lists degrees that do.
    """
    sizes = {"pp": pp_size, "cp": cp_size, "sp": ulysses_size, "tp": tp_size, "ep": ep_size}
    data = _data_degrees(dp_mode, dp_replicate_size, dp_shard_size, _DEGREE_ARGUMENTS)
    _ensure_process_group()
    plan = sections or ParallelPlan()
    ranks = _ranks_of_main(plan, dist.get_world_size())
    try:
        shape = fit_mesh(ranks, dp=dp_size, **data, **sizes, keys=_DEGREE_ARGUMENTS)
    except UserError as error:
        left = f"sections leave {ranks} of {dist.get_world_size()} ranks; " if plan.sections else ""
        raise UserError(f"{left}{error}") from None
    return _as_default(_all_sections(plan, shape, dp_mode))


def init_state_of(plan: ParallelPlan) -> ParallelState:
    """Call :func:`init_parallel_state` with the degrees that ``plan`` sets for the foundation."""
    if plan.auto:
        raise UserError(
            "parallel.auto: a layout is chosen before ranks start, by `omnitrain run RECIPE --nproc N` on one machine; "
            "for other launchers, write one into the recipe with `omnitrain plan RECIPE --gpus N --apply`"
        )
    _ensure_process_group()
    return _as_default(_states_of(plan, dist.get_world_size()))


def state_without_groups(plan: ParallelPlan, world_size: int) -> ParallelState:
    """Return the state of ``plan`` on ``world_size`` ranks without groups; errors as of :func:`init_state_of`."""
    return _states_of(plan, world_size)[MAIN]


def _states_of(plan: ParallelPlan, world_size: int) -> dict[str, ParallelState]:
    """Section -> its state without groups."""
    return _all_sections(plan, *_shape_of(plan, FOUNDATION, _ranks_of_main(plan, world_size)))


def _all_sections(plan: ParallelPlan, main: MeshShape, dp_mode: DpMode) -> dict[str, ParallelState]:
    """Section -> its state without groups: first ``main``, then the other sections. Each state knows all states."""
    states: dict[str, ParallelState] = {}
    known = states if plan.sections else {}
    states[MAIN] = ParallelState(main, 0, "cpu", dp_mode, {}, sections=known)
    first_rank = main.world_size
    for name, section in plan.sections.items():
        shape, mode = _shape_of(plan, section.components[0], section.ranks)
        states[name] = ParallelState(shape, first_rank, "cpu", mode, {}, name, first_rank, known)
        first_rank += section.ranks
    return states


def _ranks_of_main(plan: ParallelPlan, world_size: int) -> int:
    """The number of ranks that the sections leave."""
    elsewhere = sum(section.ranks for section in plan.sections.values())
    if plan.sections and world_size <= elsewhere:
        raise UserError(
            f"parallel.sections: {elsewhere} of {world_size} ranks are for {', '.join(plan.sections)}, and none is "
            f"left for the rest of the model; start with more, such as --nproc {elsewhere + 1}, or give sections fewer"
        )
    return world_size - elsewhere


def _shape_of(plan: ParallelPlan, component: str, num_ranks: int) -> tuple[MeshShape, DpMode]:
    """The factorisation of a section's ranks by the degrees of its leading component."""
    own, keys = plan.of(component), {"sp": "ulysses"}
    mode, replicate = own.mode or "fsdp2", own.dp_replicate or (None if own.mode == "replicate" else 1)
    degrees: dict[str, Any] = {axis: getattr(own, keys.get(axis, axis)) or 1 for axis in ("pp", "cp", "sp", "tp", "ep")}
    degrees |= {**_data_degrees(mode, replicate, own.dp_shard, keys), "keys": keys}
    try:
        return fit_mesh(num_ranks, **degrees), mode
    except UserError as error:
        _, *problems = str(error).splitlines()
        if component != FOUNDATION:
            path = f"parallel.sections.{plan.section_of(component)}"
            raise UserError(f"{path}.ranks: found {num_ranks}, but {component}: {'; '.join(problems)}") from None
        fitting, elsewhere = _fitting_world_size(degrees, num_ranks), sum(s.ranks for s in plan.sections.values())
        where = "parallel: on the ranks that sections leave, " if elsewhere else "parallel: "
        advice = "" if fitting is None else f"; or start it with --nproc {fitting + elsewhere}"
        raise UserError(f"{where}{'; '.join(problems)}{advice}") from None


def _fitting_world_size(degrees: Mapping[str, Any], world_size: int) -> int | None:
    """The next larger number of ranks that these degrees fit, or else the next smaller one; None: they fit none."""
    step = math.prod(degrees[axis] for axis in ("pp", "cp", "sp", "tp"))
    largest = 2 * max(world_size, step * degrees["ep"] * (degrees["dp_replicate"] or 1) * (degrees["dp_shard"] or 1))
    fitting = [ranks for ranks in range(step, largest + 1, step) if _fits(ranks, degrees)]
    return min(fitting, key=lambda ranks: (ranks < world_size, abs(ranks - world_size)), default=None)


def _fits(world_size: int, degrees: Mapping[str, Any]) -> bool:
    try:
        fit_mesh(world_size, **degrees)
    except UserError:
        return False
    return True


def _data_degrees(mode: DpMode, replicate: int | None, shard: int | None, keys: Mapping[str, str]) -> dict[str, Any]:
    """Copies and shards as :func:`fit_mesh` takes them; ``keys``: axis -> the name of its degree in messages."""
    replicate_key, shard_key = keys.get("dp_replicate", "dp_replicate"), keys.get("dp_shard", "dp_shard")
    if mode not in get_args(DpMode):
        meant = {"ddp": "; DDP is replicate", "fsdp1": "; FSDP is fsdp2", "fsdp": "; FSDP is fsdp2"}.get(str(mode), "")
        raise UserError(f"dp_mode is {mode!r}; expected one of {', '.join(get_args(DpMode))}{meant}")
    if mode == "replicate":
        if shard not in (None, 1):
            raise UserError(f"dp_mode is replicate, which does not shard; {shard_key} is {shard}, expected 1")
        shard = 1
    if mode == "hsdp" and shard is None and replicate in (None, 1):
        raise UserError(f"dp_mode is hsdp, which needs several copies; set {replicate_key} above 1, or {shard_key}")
    if mode != "fsdp2" and replicate == 1:
        replicate = None
    return {"dp_replicate": replicate, "dp_shard": shard}


def get_parallel_state() -> ParallelState:
    """Return the state of the last :func:`init_parallel_state`.

    Raises:
        UserError: :func:`init_parallel_state` was not called.
    """
    if _default is None:
        raise UserError("no parallel state exists yet; call omnitrain.init_parallel_state() first")
    return _default


def forget_parallel_state() -> None:
    """Clear the default state; call this when the process groups are destroyed."""
    global _default
    _default = None


def leave_process_groups() -> None:
    """Destroy all process groups and what keeps them alive: the default state, and the meshes in torch's caches.

    The threads of a gloo group run as long as it exists. A thread that releases a tensor while the interpreter ends
    aborts the process, so leave the groups before.
    """
    forget_parallel_state()
    forget_meshes()
    _forget_in_autograds_thread()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _forget_in_autograds_thread() -> None:
    """Clear what torch keeps for each thread also for the one in which autograd works for a GPU."""
    leaf = torch.zeros((), device="cuda" if torch.cuda.is_initialized() else "cpu", requires_grad=True)
    leaf.register_hook(lambda _: forget_shardings())
    leaf.backward()


def _ensure_process_group() -> None:
    if dist.is_initialized():
        return
    prepare_process()
    backend = "gloo"
    if torch.cuda.is_available():
        if "LOCAL_RANK" in os.environ:  # without torchrun, keep the device that the user has chosen
            torch.cuda.set_device(gpu_of_rank())
        backend = "cpu:gloo,cuda:nccl"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        join_process_group(backend)
    else:
        open_process_group(backend)


def open_process_group(backend: str) -> None:
    """Make the process group of a single process."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _as_default(states: dict[str, ParallelState]) -> ParallelState:
    """Make the state of this rank, with its process groups, the default."""
    global _default
    device_type = "cuda" if torch.cuda.is_available() and dist.get_backend() not in ("gloo", "fake") else "cpu"
    states.update({name: replace(state, device_type=device_type) for name, state in states.items()})
    own = next(state for state in states.values() if dist.get_rank() in state.ranks)
    of_sections = {name: device_meshes(s.shape, device_type, s.first_rank) for name, s in states.items()}
    _default = replace(own, rank=dist.get_rank(), _meshes=of_sections[own.section])
    return _default


def states_of_components(
    state: ParallelState, of_user: ParallelPlan, plans: Mapping[str, ComponentPlan]
) -> dict[str, ParallelState]:
    """Return component -> its section's state, or one without groups if only some ``tp`` ranks share its matrices."""
    states = {name: state.of_section(of_user.section_of(name)) for name in plans}
    own = {name: plan.tp for name, plan in plans.items() if 1 < (plan.tp or 1) < states[name].size("tp")}
    return states | {name: states[name].with_tp(tp) for name, tp in own.items() if tp is not None}


def with_own_groups(state: ParallelState, states: Mapping[str, ParallelState]) -> dict[str, ParallelState]:
    """Make the groups of states of their own, once for equal degrees in a section. All ranks must call it."""
    of_sections, made = {id(at) for at in (state, *state.sections.values())}, dict[tuple[str, int], ParallelState]()
    own = {name: at for name, at in states.items() if id(at) not in of_sections}
    for key in sorted({(at.section, at.size("tp")) for at in own.values()}):
        at = next(at for at in own.values() if (at.section, at.size("tp")) == key)
        made[key] = replace(at, _meshes=device_meshes(at.shape, state.device_type, at.first_rank))
    return {name: made[at.section, at.size("tp")] if name in own else at for name, at in states.items()}
