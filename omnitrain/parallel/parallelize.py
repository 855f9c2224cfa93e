"""``build_parallelize_model``: prepare (merge settings, refuse contradictions), load, apply each feature in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, adapters_of, add_lora, train_rows
from omnitrain.models.contract.tiny_model import drawn_in_training
from omnitrain.models.foundation.shared_tower import SharedTower
from omnitrain.models.hf.compute_dtype import compute_in, stays_fp32
from omnitrain.models.omni.build import build_omni_model, require_device
from omnitrain.models.omni.model import OmniModel, rest_frozen_statistics
from omnitrain.models.omni.save import keep_conversions
from omnitrain.ops.collectives import gathered_objects
from omnitrain.ops.compile.blocks import compile_blocks
from omnitrain.parallel.expert.apply import bound_rows, chosen_layers, expert_layers, spread_experts, use_tp_dispatch
from omnitrain.parallel.fsdp.hold import HeldUnits
from omnitrain.parallel.fsdp.load import (
    adapters_at,
    first_ranks,
    load_weights,
    require_equal_weights,
    require_one_source,
    require_same_adapters,
    require_same_parameters,
)
from omnitrain.parallel.fsdp.shard import Sharding, device_of, shard
from omnitrain.parallel.fsdp.units import ComponentUnits, find_units, unit_names
from omnitrain.parallel.fsdp.weight_loader import WeightLoader, Where, where_weights_are
from omnitrain.parallel.layout import ComponentLayout, ModelLayout, remember_layout
from omnitrain.parallel.memory.offload import ActivationOffload
from omnitrain.parallel.memory.recompute import offload_tensors, recompute_blocks, recompute_parts
from omnitrain.parallel.meshes import data_mesh
from omnitrain.parallel.pipeline.apply import Pipeline, cut_into_stages, units_by_stage
from omnitrain.parallel.pipeline.stages import drop_parameters, ignore_absent_in_device, ranks_of_stages
from omnitrain.parallel.placement import calling_axes, calling_state, place_components
from omnitrain.parallel.resolve import CallFlags, dtype_of, resolve_plans
from omnitrain.parallel.resolve.sections import divide_encoders
from omnitrain.parallel.schedule.inference import InferenceOnRanks
from omnitrain.parallel.sections.edges import FeatureEdge, connect_sections
from omnitrain.parallel.sequence.apply import slice_of_call
from omnitrain.parallel.sequence.async_ulysses.check import apply_async_ulysses
from omnitrain.parallel.state import ParallelState, get_parallel_state, states_of_components, with_own_groups
from omnitrain.parallel.tensor.apply import shard_matrices
from omnitrain.parallel.tensor.check import require_same_math, try_tokens
from omnitrain.parallel.tensor.plan import TensorPlan, tensor_plan
from omnitrain.parallel.tensor.sequence_parallel import TokenSharding, apply_sequence_parallel
from omnitrain.parallel.tensor.styles import styles_with_adapters
from omnitrain.peers import is_spread
from omnitrain.plan.mesh import MeshShape
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan, Section


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
    """Parallelize a model in place: apply to each component what its plan sets.

    If a component's plan leaves a field unset, the default plan sets it, then the parallel state, then the arguments
    of this call. Two different explicit values are an error. Every rank must call this with the same arguments.

    Args:
        model: an :class:`OmniModel`, or a HF model, which becomes the foundation of a new one.
        weights_path: folder or Hub id of a complete checkpoint of ``model`` and its LoRA adapters. Each rank reads its
            shards of safetensors files; where some rank lacks the files, rank 0 reads and broadcasts them. None: the
            model has its weights already, at least on rank 0. Ranks that hold the model on the meta device receive the
            weights from rank 0, one FSDP unit at a time. With sections, the first rank of each takes the place of rank
            0.
        parallel_state: None: the state of the last :func:`init_parallel_state`.
        parallel_plan: None: every component follows the parallel state.
        enable_full_shard: reshard the parameters after the forward. False: keep them unsharded until the backward,
            which needs less communication and more memory.
        enable_mixed_precision: compute in bf16 unless a plan sets another dtype. False: a plan with another compute
            dtype is an error. None: only the plans set the compute dtype.
        enable_gradient_checkpointing: recompute all blocks in the backward, unless a plan sets ``memory.recompute``.
        init_device: move the weights to ``cpu`` or ``cuda`` before sharding. None: leave them. Sharding moves them to
            the state's device, one FSDP unit at a time.
        enable_fsdp_offload: keep parameter shards in host memory, unless a plan sets ``memory.offload``.

    Returns:
        The omni model. Its forward and backward compute the same as one process with the samples of all ranks, and
        gradients are sums over the ranks. :func:`layout_of` returns the applied layout.

    Raises:
        UserError: the plan, the state, the arguments and the model contradict each other. The message lists all
            contradictions, and the model is unchanged.
        WeightsError: the checkpoint does not match the model; no weight is loaded.
    """
    _require_types(
        model=(model, PreTrainedModel, "an OmniModel or a transformers model"),
        weights_path=(weights_path, str | Path | None, "a folder or a Hub id"),
        parallel_state=(parallel_state, ParallelState | None, "the state that init_parallel_state returns"),
        parallel_plan=(parallel_plan, ParallelPlan | None, "a ParallelPlan"),
        enable_full_shard=(enable_full_shard, bool, "True or False"),
        enable_mixed_precision=(
            enable_mixed_precision,
            bool | None,
            "True (bf16), False or None; set other dtypes in a plan",
        ),
        enable_gradient_checkpointing=(enable_gradient_checkpointing, bool, "True or False"),
        enable_fsdp_offload=(enable_fsdp_offload, bool, "True or False"),
    )
    require_device(init_device or "cpu")
    flags = CallFlags(enable_mixed_precision, enable_gradient_checkpointing, enable_fsdp_offload)
    path = None if weights_path is None else str(weights_path)
    prepared = _prepare(model, path, parallel_state or get_parallel_state(), parallel_plan or ParallelPlan(), flags)
    loads = _load(prepared, model, path, init_device)
    _apply(prepared, loader_class=WeightLoader if loads else None, full_shard=enable_full_shard)
    return prepared.model


def parallelize_alone(
    model: OmniModel,
    state: ParallelState,
    plan: ParallelPlan,
    flags: CallFlags,
    loader: Callable[..., WeightLoader],
) -> None:
    """Apply a plan to the model of one rank whose peers are not there.

    See :mod:`omnitrain.parallel.fake_world`. ``loader`` puts its weights in place. Styles of tensor parallelism are not
    tried: their trial needs all ranks.
    """
    _apply(_prepare(model, None, state, plan, flags, is_alone=True), loader_class=loader, full_shard=True)


@dataclass(frozen=True)
class _Prepared:
    """What to apply to a model: all settings merged, and accepted."""

    model: OmniModel  # the omni model, not changed yet
    state: ParallelState  # the ranks
    plan: ParallelPlan  # the user's plan
    plans: dict[str, ComponentPlan]  # component -> its complete plan
    tensors: TensorPlan  # the styles of tensor parallelism
    tokens: TokenSharding | None  # whether Megatron's sequence parallelism applies; None: the plan does not ask for it
    adapters: Mapping[str, Adapters]  # component -> LoRA adapters that its plan adds
    stored: Mapping[str, Adapters]  # component -> LoRA adapters in the checkpoint
    where: Sequence[Where]  # for each rank, where its weights are
    states: Mapping[str, ParallelState]  # component -> the ranks that share its matrices


def _prepare(
    model: PreTrainedModel,
    weights_path: str | None,
    state: ParallelState,
    plan: ParallelPlan,
    flags: CallFlags,
    *,
    is_alone: bool = False,
) -> _Prepared:
    """Merge the plan, the state and the flags; refuse contradictions. The model stays as it is.

    ``is_alone``: the other ranks are not there.
    """
    if is_spread(model):
        raise UserError("the model is parallelized already; build a new one to use another layout")
    omni = model if isinstance(model, OmniModel) else build_omni_model(foundation=model, init_device=str(model.device))
    divide_encoders(omni, plan)
    tensors = tensor_plan(omni, plan, state.degrees("tp"))
    stored = first_ranks(partial(adapters_at, weights_path, omni)) if weights_path is not None and omni is model else {}
    present = stored | adapters_of(omni)
    if state.num_ranks > 1:
        require_same_adapters(present)
    plans, adapters = resolve_plans(omni, plan, state, flags, tensors, present)
    where = where_weights_are(omni)
    is_bare = not is_alone and any(where[rank] == "meta" for rank in _sources(state))
    require_one_source(omni, weights_path, is_bare=is_bare)
    states = with_own_groups(state, states_of_components(state, plan, plans))

    def try_on_tiny_model() -> TokenSharding | None:
        """Refuse styles with which a tiny model gives other results; return whether sequence parallelism applies."""
        if not is_alone:
            _require_same_math(omni, tensors, {n: at for n, at in states.items() if at.section == state.section})
        if state.section != MAIN:
            return None
        tokens = _token_sharding(omni, plans[FOUNDATION], tensors, state)
        return replace(tokens, problem="") if is_alone and tokens is not None and tokens.ends else tokens

    tokens = first_ranks(try_on_tiny_model, range(state.num_ranks))
    return _Prepared(omni, state, plan, plans, tensors, tokens, adapters, stored, where, states)


def _require_same_math(model: OmniModel, tensors: TensorPlan, states: Mapping[str, ParallelState]) -> None:
    """Try the styles of the foundation and of teachers on tiny models. ``states``: of components of this rank."""
    for at, styles in _styles_by_state(tensors, states):
        for language_model, root in model.language_models.values():
            require_same_math(language_model, styles, at, root)


def _styles_by_state(
    tensors: TensorPlan, states: Mapping[str, ParallelState]
) -> Iterator[tuple[ParallelState, dict[str, str]]]:
    """Yield each state whose ``tp`` ranks share matrices, and the styles of its components."""
    for at in dict.fromkeys(states.values()):
        yield at, tensors.of_components([name for name, own in states.items() if own is at])


def _sources(state: ParallelState) -> list[int]:
    """The first rank of each section, from which its other ranks get their weights."""
    return [section.first_rank for section in state.sections.values()] or [0]


def _load(prepared: _Prepared, model: PreTrainedModel, weights_path: str | None, init_device: str | None) -> bool:
    """Load the weights, with several ranks on the first rank of each section, which leaves them in their files.

    Returns whether all ranks get theirs while the model is sharded.
    """
    omni, is_spread_out = prepared.model, prepared.state.num_ranks > 1
    if weights_path is not None:
        load = partial(load_weights, model, weights_path, in_files=is_spread_out)
        first_ranks(load, _sources(prepared.state))
        add_lora(omni, prepared.stored)
    if init_device not in (None, "meta") and omni.device.type != "meta":
        omni.to(init_device)
    loads = is_spread_out and (weights_path is not None or any(where != "memory" for where in prepared.where))
    (require_same_parameters if loads else require_equal_weights)(omni)
    return loads


def _apply(prepared: _Prepared, *, loader_class: Callable[..., WeightLoader] | None, full_shard: bool) -> None:
    """Apply each feature, in this order; ``loader_class``: of weights that are not in memory on every rank."""
    omni, state, states = prepared.model, prepared.state, prepared.states
    plans = {name: plan for name, plan in prepared.plans.items() if states[name].section == state.section}
    device = device_of(state.fsdp_mesh)
    keep_conversions(omni)

    # What trains, and in which precision
    _freeze(omni, prepared.plans)
    add_lora(omni, prepared.adapters)
    rest_frozen_statistics(omni)
    elsewhere = frozenset(chain.from_iterable(omni.components[name] for name in omni.components.keys() - plans))
    loader = None if loader_class is None else loader_class(omni, device, state.section_group, elsewhere)
    _set_precision(omni, prepared.plans)  # the loader casts each tensor to the dtype set here
    _set_compute_dtypes(omni, prepared.plans)

    # Sections and pipeline: which parameters this rank has
    topology = place_components(omni, prepared.plans, states)
    omni.call_elements = topology.call_elements
    on_all = topology.names("exchange")
    pipeline = cut_into_stages(omni, prepared.plans[FOUNDATION], state.of_section(MAIN), on_all)
    absent = elsewhere if pipeline is None else pipeline.absent | elsewhere
    _leave_out(omni, absent, loader)

    # Tensor parallelism, experts, async Ulysses, towers that ranks share
    _shard_matrices(prepared, plans, pipeline)
    calling = {name: calling_state(plan, states[name], state) for name, plan in plans.items()}
    experts = _spread_experts(omni, plans, prepared.plan, state, calling)
    foundation = plans.get(FOUNDATION, ComponentPlan())
    async_ulysses = apply_async_ulysses(omni, state.size("sp")) if foundation.async_ulysses else None
    towers = _share_towers(omni, plans, state)

    # Each FSDP unit: recompute and offload, compile, shard
    units = find_units(omni, experts)
    activations = _apply_recompute_and_offload(omni, plans, units, state)
    compiled = compile_blocks(omni.foundation, device) if foundation.compile else None
    sharding = _shardings(prepared.plans | plans, state, states, full_shard)
    root = FOUNDATION if FOUNDATION in plans else next(iter(plans))
    shard(omni, units, sharding, None if loader is None else loader.fill, absent, root)
    train_rows(omni)
    if loader is not None:
        loader.finish()

    # What was applied
    of_foundation = {"compiled": compiled, "async_ulysses": async_ulysses, "tokens": prepared.tokens}
    components = _layouts(omni, prepared.plans | plans, units, activations, towers, of_foundation)
    exchanges = {name: calling[name].group(axes) for name, axes in topology.exchanges.items() if name in plans}
    sections = prepared.plan.sections
    components = _with_units_of_all(components, list(plans)) if sections else components
    edges, losses = _connected(omni, prepared, device)
    section = sections.get(state.section)
    omni.takes_batches, omni.inference = False, InferenceOnRanks(omni, state, list(plans), pipeline)
    held = _held_units(omni, pipeline, components, on_all, section)
    layout = ModelLayout(
        state, states, components, topology, pipeline, exchanges, section, edges, losses, sections, held=held
    )
    remember_layout(omni, layout)


def _held_units(
    model: OmniModel,
    pipeline: Pipeline | None,
    components: Mapping[str, ComponentLayout],
    on_all: Collection[str],
    section: Section | None,
) -> HeldUnits:
    """This rank's units by stage, and by the encoders that have actions of their own."""
    separate = [*on_all, *([] if section is None else section.components)]
    owned: dict[int | str, Sequence[str]] = {name: components[name].units for name in separate}
    stages = None if pipeline is None else pipeline.stages
    by_stage = units_by_stage(model, stages, {*chain.from_iterable(owned.values())})
    return HeldUnits(model, owned | dict(by_stage.items()))


def _connected(
    model: OmniModel, prepared: _Prepared, device: torch.device
) -> tuple[dict[str, FeatureEdge], dict[str, FeatureEdge]]:
    """This rank's ends of the edges of sections; see :func:`connect_sections`."""
    if not prepared.plan.sections:
        return {}, {}
    foundation = prepared.plans[FOUNDATION]
    ranks = ranks_of_stages(foundation.schedule, foundation.pp or 1)
    dtype = dtype_of(foundation.precision.compute) or model.dtype
    return connect_sections(model, prepared.plan.sections, prepared.state, device, dtype=dtype, last_stage=ranks[-1])


def _leave_out(model: OmniModel, absent: Collection[str], loader: WeightLoader | None) -> None:
    """Make the parameters that only other ranks have empty."""
    if loader is not None:
        loader.absent = absent
    else:
        drop_parameters(model, absent)
    if absent:
        ignore_absent_in_device()


def _freeze(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> None:
    for name, parameters in model.components.items():
        for parameter in parameters.values() if plans[name].freeze else ():
            parameter.requires_grad_(False)


def _shard_matrices(prepared: _Prepared, plans: Mapping[str, ComponentPlan], pipeline: Pipeline | None) -> None:
    """Apply tensor parallelism to the components of this rank, and Megatron's sequence parallelism."""
    model, tokens, styles = prepared.model, prepared.tokens, prepared.tensors
    ends = () if tokens is None else tokens.ends_in(styles.of_components(plans))
    for at, of_state in _styles_by_state(styles, {name: prepared.states[name] for name in plans}):
        shard_matrices(model, styles_with_adapters(of_state, model.renamed), at.tp_mesh, ends)
    if tokens is not None and not tokens.problem:
        last, spans = [model.get_submodule(n) for n in ends], None if pipeline is None else pipeline.stages.spans
        apply_sequence_parallel(model.foundation, last, prepared.state.tp_mesh.get_group(), spans)


def _require_types(**arguments: tuple[object, Any, str]) -> None:
    """Raise for values of other types; ``arguments``: name -> value, its types, and their description."""
    for name, (value, types, expected) in arguments.items():
        if not isinstance(value, types):
            shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
            raise UserError(f"{name}: found {shown}; expected {expected}")


def _token_sharding(
    model: OmniModel, plan: ComponentPlan, tensors: TensorPlan, state: ParallelState
) -> TokenSharding | None:
    """Whether Megatron's sequence parallelism applies, or why not; None: the plan does not ask for it."""
    if not plan.sequence_parallel:
        return None
    if plan.compile:
        return TokenSharding("its blocks are compiled")
    if drawn := drawn_in_training(model.foundation.config):  # tensor parallel ranks must draw the same numbers
        return TokenSharding(f"it draws random numbers in training ({', '.join(drawn)})")
    return try_tokens(model.foundation, tensors.styles, state)


def _set_precision(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> None:
    """Cast the parameters as planned; adapters, and modules that transformers keeps in fp32, stay fp32."""
    must_stay_fp32, adapters = stays_fp32(model), model.adapter_names
    for name, parameters in model.components.items():
        dtype = dtype_of(plans[name].precision.param)
        for path, parameter in parameters.items():
            if must_stay_fp32(path):
                parameter.data = parameter.data.float()
            elif dtype is not None and parameter.is_floating_point() and path not in adapters:
                parameter.data = parameter.data.to(dtype)


def _set_compute_dtypes(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> None:
    """Tell the code of each HF model in which dtypes its components compute."""
    computed = {name: dtype_of(plan.precision.compute) for name, plan in plans.items()}
    must_stay_fp32 = stays_fp32(model)
    dtypes = {
        parameter: torch.float32 if must_stay_fp32(path) else computed[name]
        for name, parameters in model.components.items()
        for path, parameter in parameters.items()
    }

    def stays_fp32_in(root: str, name: str) -> bool:
        return must_stay_fp32(f"{root}.{name}")

    for name, module in model.named_children():
        assert isinstance(module, PreTrainedModel)
        compute_in(module, dtypes, computed.get(name), partial(stays_fp32_in, name))


def _spread_experts(
    model: OmniModel,
    plans: dict[str, ComponentPlan],
    plan: ParallelPlan,
    state: ParallelState,
    calling: Mapping[str, ParallelState],
) -> dict[str, tuple[str, ...]]:
    """Apply expert parallelism; return component -> names of its sharded experts. Updates the plans' dispatcher.

    ``calling``: component -> the state on whose axes ranks call it together.
    """
    spread = {}
    for name, layers in expert_layers(model).items():
        if name not in plans:
            continue
        chosen = chosen_layers(model, layers, plan.ep_plan)
        if (rows := plans[name].experts.rows) is not None:
            bound_rows(model, layers, rows)
        if (plans[name].ep or 1) > 1:
            used = spread_experts(model, chosen, state.ep_mesh, plans[name])
            plans[name] = plans[name].changed({"experts.dispatcher": used})
            spread[name] = tuple(layer.name for layer in chosen)
        if "tp" in calling_axes(plans[name]):
            use_tp_dispatch(model, layers, calling[name].tp_mesh)
    return spread


def _share_towers(model: OmniModel, plans: Mapping[str, ComponentPlan], state: ParallelState) -> dict[str, SharedTower]:
    """The components whose calls all ranks of a sequence group make together."""
    shared = {name for name, plan in plans.items() if name != FOUNDATION and (plan.ulysses or 1) > 1}
    slice_of = partial(slice_of_call, state)
    for name in shared.intersection(model.teachers):
        model.get_submodule(name).slice_of = slice_of
    towers = sorted(shared.difference(model.teachers))
    return {name: SharedTower(model, model.components[name].values(), slice_of) for name in towers}


def _apply_recompute_and_offload(
    model: OmniModel, plans: Mapping[str, ComponentPlan], units: Mapping[str, ComponentUnits], state: ParallelState
) -> dict[str, ActivationOffload]:
    """Apply recompute and activation offload to the blocks; return component -> its offload."""
    offloads: dict[str, ActivationOffload] = {}
    for name, plan in plans.items():
        blocks = [model.get_submodule(block) for block in units[name].blocks]
        memory = plan.memory
        if memory.offloads("activations") or memory.offloaded_tensors:
            offloads[name] = ActivationOffload(torch.device(state.device_type))
        offload = offloads.get(name)
        if memory.mode == "parts":
            recompute_parts(model, units[name].blocks, memory.recomputed_parts or ())
        elif memory.mode != "none":
            recompute_blocks(blocks, memory.kept_ops, around=offload.saving if offload else None)
        if offload is not None and memory.offloaded_tensors:
            offload_tensors(model, units[name].blocks, memory.offloaded_tensors, offload)
        elif offload is not None and not memory.recomputes_blocks:
            for block in blocks:
                offload.attach(block)
    return offloads


def _shardings(
    plans: Mapping[str, ComponentPlan], state: ParallelState, states: Mapping[str, ParallelState], full_shard: bool
) -> dict[str, Sharding]:
    """Component of this rank's section -> its sharding. Components of a section with the same degrees share a mesh."""
    meshes: dict[tuple[str, int, int, int], DeviceMesh | None] = {
        (at.section, at.size("tp"), at.shape.dp_replicate, at.size("fsdp")): at.fsdp_mesh
        for at in states.values()
        if at.section == state.section
    }
    shardings = {}
    for name, plan in plans.items():
        at, copies = states[name], (plan.dp_replicate or 1, plan.dp_shard or 1)
        key = (at.section, at.size("tp"), *copies)
        if key not in meshes and copies != (at.shape.dp_replicate, at.size("fsdp")):
            shape = MeshShape(at.size("pp"), *copies, tp=at.size("tp"))
            meshes[key] = data_mesh(shape, at.device_type, at.first_rank)  # all ranks make its groups
        if at.section == state.section and (mesh := meshes[key]) is not None:
            shardings[name] = _sharding(plan, mesh, state, full_shard)
    return shardings


def _sharding(plan: ComponentPlan, mesh: DeviceMesh, state: ParallelState, full_shard: bool) -> Sharding:
    param, compute = plan.precision.param, plan.precision.compute
    return Sharding(
        mesh=mesh,
        expert_mesh=state.ep_fsdp_mesh,
        compute_dtype=None if param == compute == "float32" else dtype_of(compute),  # media arrive in fp32
        reduce_dtype=dtype_of(plan.precision.reduce),
        keep_unsharded=not full_shard,
        offload=plan.memory.offloads("parameters"),
    )


def _layouts(
    model: OmniModel,
    plans: Mapping[str, ComponentPlan],
    units: Mapping[str, ComponentUnits],
    activations: Mapping[str, ActivationOffload],
    towers: Mapping[str, SharedTower],
    of_foundation: Mapping[str, Any],
) -> dict[str, ComponentLayout]:
    sharded = {
        name: tuple(unit for unit in of_component if isinstance(model.get_submodule(unit), FSDPModule))
        for name, of_component in unit_names(units).items()
    }
    return {
        name: ComponentLayout(
            name=name,
            plan=plans[name],
            units=sharded[name],
            parameters=tuple(parameters),
            num_units=len(sharded[name]),
            activations=activations.get(name),
            tower=towers.get(name),
            **(of_foundation if name == FOUNDATION else {}),
        )
        for name, parameters in model.components.items()
    }


def _with_units_of_all(components: Mapping[str, ComponentLayout], own: Collection[str]) -> dict[str, ComponentLayout]:
    """Add the number of units of components that other sections have; all ranks call it."""
    numbers: dict[str, int] = {}
    for of_rank in reversed(gathered_objects({name: components[name].num_units for name in own})):
        numbers |= of_rank  # the first rank of a section counts
    return {name: replace(component, num_units=numbers[name]) for name, component in components.items()}
