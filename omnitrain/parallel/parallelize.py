"""``build_parallelize_model``: the plan of every component, applied in one order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import adapters_of, add_lora
from omnitrain.models.contract.tiny_model import drawn_in_training
from omnitrain.models.foundation.shared_tower import SharedTower
from omnitrain.models.omni.build import build_omni_model, require_device
from omnitrain.models.omni.freeze_batchnorm import rest_frozen_statistics
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import compile_blocks
from omnitrain.parallel.expert.apply import bound_rows, chosen_layers, expert_layers, share_tokens, spread_experts
from omnitrain.parallel.fsdp.broadcast_load import SOURCE, BroadcastLoader, ranks_without_weights
from omnitrain.parallel.fsdp.load import (
    adapters_at,
    load_weights,
    rank0_first,
    require_equal_weights,
    require_one_source,
    require_same_adapters,
    require_same_parameters,
)
from omnitrain.parallel.fsdp.shard import Sharding, device_of, shard
from omnitrain.parallel.fsdp.units import ComponentUnits, find_units, stays_fp32
from omnitrain.parallel.layout import ComponentLayout, ModelLayout, remember_layout
from omnitrain.parallel.memory.offload import ActivationOffload
from omnitrain.parallel.memory.recompute import recompute_blocks
from omnitrain.parallel.memory.selective_recompute import offload_tensors, recompute_parts
from omnitrain.parallel.resolve import CallFlags, dtype_of, resolve_plans
from omnitrain.parallel.sequence.apply import part_of_call
from omnitrain.parallel.sequence.async_ulysses.apply import drive_foundation
from omnitrain.parallel.state import ParallelState, get_parallel_state
from omnitrain.parallel.tensor.adapters import styles_with_adapters
from omnitrain.parallel.tensor.apply import cut_tensors
from omnitrain.parallel.tensor.check import require_same_math, try_tokens
from omnitrain.parallel.tensor.plan import TensorPlan, tensor_plan
from omnitrain.parallel.tensor.sequence_parallel import TokenSharding, divide_tokens
from omnitrain.peers import is_spread
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan


def build_parallelize_model(
    model: PreTrainedModel,
    weights_path: str | Path | None = None,
    parallel_state: ParallelState | None = None,
    parallel_plan: ParallelPlan | None = None,
    enable_full_shard: bool = True,
    enable_mixed_precision: bool | None = True,
    enable_gradient_checkpointing: bool = False,
    init_device: str | None = None,
    enable_fsdp_offload: bool = False,
) -> OmniModel:
    """Lay a model out over the ranks, in place, each component as its plan says.

    A field that a component's plan leaves unset comes from the default plan, then from the state, then from this call.
    Set in two places and different, it is an error. Every rank must call this, with the same arguments.

    Args:
        model: an :class:`OmniModel`, or a HF model, which becomes the foundation of one.
        weights_path: folder or Hub id of a checkpoint of ``model`` and of its LoRA adapters, all or error, which rank 0
            reads; None: the model has its weights, on rank 0 at least. Ranks on which it is on the meta device get
            theirs from rank 0, unit by unit.
        parallel_state: None: that of :func:`init_parallel_state`.
        parallel_plan: None: every component lies as the state says.
        enable_full_shard: parameters are sharded again between forward and backward; False: kept, for less
            communication and more memory.
        enable_mixed_precision: compute in bf16, unless a plan says otherwise; False: no plan may say so; None: where a
            plan says so.
        enable_gradient_checkpointing: recompute all blocks in the backward, unless a plan says otherwise.
        init_device: where weights are before they are sharded, ``cpu`` or ``cuda``; None: where they are. Sharding
            moves them to the state's device, unit by unit.
        enable_fsdp_offload: parameter shards live in host memory, unless a plan says otherwise.

    Returns:
        The omni model: its forward and backward are those of one process on the samples of all ranks, gradients are
        sums over them. :func:`layout_of` tells what was done.

    Raises:
        UserError: the plan, the state, the flags and the model contradict one another; all contradictions are listed,
            and the model is as it was.
        WeightsError: the checkpoint does not fit; nothing is loaded.
    """
    _require_kinds(
        model=(model, PreTrainedModel, "an OmniModel or a model of transformers"),
        weights_path=(weights_path, str | Path | None, "a folder or a Hub id"),
        parallel_state=(parallel_state, ParallelState | None, "what init_parallel_state returns"),
        parallel_plan=(parallel_plan, ParallelPlan | None, "a ParallelPlan"),
        enable_full_shard=(enable_full_shard, bool, "True or False"),
        enable_mixed_precision=(enable_mixed_precision, bool | None, "True (bf16), False or None; a plan names others"),
        enable_gradient_checkpointing=(enable_gradient_checkpointing, bool, "True or False"),
        enable_fsdp_offload=(enable_fsdp_offload, bool, "True or False"),
    )
    require_device(init_device or "cpu")
    weights_path = None if weights_path is None else str(weights_path)
    state = parallel_state or get_parallel_state()
    omni = _as_omni(model)
    flags = CallFlags(enable_mixed_precision, enable_gradient_checkpointing, enable_fsdp_offload)
    plan = parallel_plan or ParallelPlan()
    tensors = tensor_plan(omni, plan, state.size("tp"))
    stored = rank0_first(partial(adapters_at, weights_path, omni)) if weights_path is not None and omni is model else {}
    present = stored | adapters_of(omni)
    if state.world_size > 1:
        require_same_adapters(present)
    plans, adapters = resolve_plans(omni, plan, state, flags, tensors, present)
    bare = ranks_without_weights(omni)
    require_one_source(omni, weights_path, is_bare=bare[SOURCE])
    require_same_math(omni.foundation, tensors.styles, state)
    tokens = _divided_tokens(omni, plans[FOUNDATION], tensors, state)

    if weights_path is not None:
        rank0_first(partial(load_weights, model, weights_path))
        add_lora(omni, stored)
    if init_device not in (None, "meta") and omni.device.type != "meta":
        omni.to(init_device)
    hands_out = state.world_size > 1 and (weights_path is not None or any(bare))
    (require_same_parameters if hands_out else require_equal_weights)(omni)

    _freeze(omni, plans)
    add_lora(omni, adapters)
    rest_frozen_statistics(omni)
    handed_out = BroadcastLoader(omni, device_of(state.fsdp_mesh)) if hands_out else None
    _set_precision(omni, plans)  # what is handed out is cast on its way, tensor by tensor
    ends = () if tokens is None else tokens.ends_in(tensors.styles)
    cut_tensors(omni, styles_with_adapters(tensors.styles, omni.renamed), state.tp_mesh, ends)
    if tokens is not None and not tokens.problem:
        divide_tokens(omni.foundation, [omni.get_submodule(name) for name in ends], state.tp_mesh.get_group())
    experts = _spread_experts(omni, plans, plan, state)
    driven = drive_foundation(omni, state.size("sp")) if plans[FOUNDATION].async_ulysses else None
    towers = _share_towers(omni, plans, state)
    units = find_units(omni, experts)
    activations = _keep_activations(omni, plans, units, state)
    compiled = compile_blocks(omni.foundation, device_of(state.fsdp_mesh)) if plans[FOUNDATION].compile else None
    meshes = _meshes(plans, state)
    how = {name: _sharding(plan, meshes[name], state.ep_fsdp_mesh, enable_full_shard) for name, plan in plans.items()}
    shard(omni, units, how, fill=None if handed_out is None else handed_out.fill)
    done = {"compiled": compiled, "driven": driven, "tokens": tokens}
    components = _applied(omni, plans, meshes, units, activations, towers, done)
    remember_layout(omni, ModelLayout(state, components))
    return omni


def _require_kinds(**arguments: tuple[object, Any, str]) -> None:
    """Name -> value, the types it may have, and what they are."""
    for name, (value, kinds, expected) in arguments.items():
        if not isinstance(value, kinds):
            what = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
            raise UserError(f"{name}: found {what}; expected {expected}")


def _as_omni(model: PreTrainedModel) -> OmniModel:
    if is_spread(model):
        raise UserError("the model is parallelized already; build a new one for another layout")
    return model if isinstance(model, OmniModel) else build_omni_model(foundation=model, init_device=str(model.device))


def _divided_tokens(
    model: OmniModel, plan: ComponentPlan, tensors: TensorPlan, state: ParallelState
) -> TokenSharding | None:
    """What becomes of the tokens between blocks; None: nobody wants them divided."""
    if not plan.sequence_parallel:
        return None
    if plan.compile:
        return TokenSharding("its blocks are compiled")
    if drawn := drawn_in_training(model.foundation.config):  # ranks would draw apart, which must draw alike
        return TokenSharding(f"it draws at random in training ({', '.join(drawn)})")
    return try_tokens(model.foundation, tensors.styles, state)


def _freeze(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> None:
    for name, parameters in model.components.items():
        if plans[name].freeze:
            for parameter in parameters.values():
                parameter.requires_grad_(False)


def _set_precision(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> None:
    """The dtype of the parameters; adapters, and what its model keeps in fp32, are fp32 whatever the plan says."""
    keep, adapters = stays_fp32(model), model.adapter_names
    for name, parameters in model.components.items():
        precision = plans[name].precision
        dtype = dtype_of(precision.param if precision else None)
        for path, parameter in parameters.items():
            if keep(path):
                parameter.data = parameter.data.float()
            elif dtype is not None and parameter.is_floating_point() and path not in adapters:
                parameter.data = parameter.data.to(dtype)


def _spread_experts(
    model: OmniModel, plans: dict[str, ComponentPlan], plan: ParallelPlan, state: ParallelState
) -> dict[str, tuple[str, ...]]:
    """Component -> names of its modules of experts that are now spread over ranks; plans say what moves their rows."""
    spread = {}
    for name, layers in expert_layers(model).items():
        chosen = chosen_layers(model, layers, plan.ep_plan)
        if plans[name].expert_rows is not None:
            bound_rows(model, layers, plans[name].expert_rows)
        if (plans[name].ep or 1) > 1:
            used = spread_experts(model, chosen, state.ep_mesh, plans[name])
            plans[name] = plans[name].model_copy(update={"expert_dispatcher": used})
            spread[name] = tuple(layer.name for layer in chosen)
        share_tokens(model, layers, state.tp_mesh)
    return spread


def _share_towers(model: OmniModel, plans: Mapping[str, ComponentPlan], state: ParallelState) -> dict[str, SharedTower]:
    """The components whose calls are made by all ranks of a sequence together."""
    return {
        name: SharedTower(model, parameters.values(), partial(part_of_call, state))
        for name, parameters in model.components.items()
        if name != FOUNDATION and (plans[name].ulysses or 1) > 1
    }


def _keep_activations(
    model: OmniModel, plans: Mapping[str, ComponentPlan], units: Mapping[str, ComponentUnits], state: ParallelState
) -> dict[str, ActivationOffload]:
    """What of a forward waits for its backward, and where: recompute and offload, of blocks."""
    offloads: dict[str, ActivationOffload] = {}
    for name, plan in plans.items():
        blocks = [model.get_submodule(block) for block in units[name].blocks]
        if plan.activation_offload or plan.offloaded_tensors:
            offloads[name] = ActivationOffload(torch.device(state.device_type))
        offload = offloads.get(name)
        if plan.recompute == "parts":
            recompute_parts(model, units[name].blocks, plan.recomputed_parts or ())
        elif plan.recompute != "none":
            recompute_blocks(blocks, plan.saved_ops, around=offload.saving if offload else None)
        if offload is not None and plan.offloaded_tensors:
            offload_tensors(model, units[name].blocks, plan.offloaded_tensors, offload)
        elif offload is not None and plan.recompute in ("none", "parts"):
            for block in blocks:
                offload.attach(block)
    return offloads


def _meshes(plans: Mapping[str, ComponentPlan], state: ParallelState) -> dict[str, DeviceMesh]:
    """Component -> mesh; components with the same degrees share one, the foundation's is the state's.

    Parameters lie in the same way on the ranks of each place on the axis of tensor parallelism.
    """
    made = {(state.shape.dp_replicate, state.size("fsdp")): state.fsdp_mesh}
    for plan in plans.values():
        degrees = (plan.dp_replicate or 1, plan.dp_shard or 1)
        if degrees not in made:
            shape, names = (degrees, ("dp_replicate", "fsdp")) if degrees[0] > 1 else (degrees[1:], ("fsdp",))
            root = init_device_mesh(state.device_type, (*shape, state.size("tp")), mesh_dim_names=(*names, "tp"))
            made[degrees] = root[names]
    return {name: made[plan.dp_replicate or 1, plan.dp_shard or 1] for name, plan in plans.items()}


def _sharding(plan: ComponentPlan, mesh: DeviceMesh, expert_mesh: DeviceMesh, full_shard: bool) -> Sharding:
    assert plan.precision is not None
    compute = None if plan.precision.compute == plan.precision.param else plan.precision.compute
    return Sharding(
        mesh=mesh,
        expert_mesh=expert_mesh,
        compute_dtype=dtype_of(compute),
        reduce_dtype=dtype_of(plan.precision.reduce),
        keep_unsharded=not full_shard,
        offload=bool(plan.parameter_offload),
    )


def _applied(
    model: OmniModel,
    plans: Mapping[str, ComponentPlan],
    meshes: Mapping[str, DeviceMesh],
    units: Mapping[str, ComponentUnits],
    activations: Mapping[str, ActivationOffload],
    towers: Mapping[str, SharedTower],
    of_foundation: Mapping[str, Any],
) -> dict[str, ComponentLayout]:
    return {
        name: ComponentLayout(
            name=name,
            plan=plans[name],
            mesh=meshes[name],
            units=_with_root(units[name].all) if name == FOUNDATION else units[name].all,
            parameters=tuple(own),
            is_trained=any(parameter.requires_grad for parameter in own.values()),
            activations=activations.get(name),
            tower=towers.get(name),
            **(of_foundation if name == FOUNDATION else {}),
        )
        for name, own in model.components.items()
    }


def _with_root(units: tuple[str, ...]) -> tuple[str, ...]:
    """The foundation's units; the root is one where the foundation as a whole is none."""
    return units if FOUNDATION in units else (*units, "")
