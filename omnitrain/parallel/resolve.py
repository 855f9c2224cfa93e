"""One complete plan per component, from what the plan, the parallel state and the call say of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnitrain.errors import UserError
from omnitrain.models.contract.sequence import SequenceContract, sequence_contract_of
from omnitrain.models.contract.tower import attached_tower_contract, native_tower_contract
from omnitrain.models.contract.twin import drawn_in_training
from omnitrain.models.lora import adapters_of
from omnitrain.models.omni import OmniModel
from omnitrain.ops.experts import AUTO
from omnitrain.parallel.experts import (
    ExpertLayer,
    chosen_layers,
    ep_plan_problems,
    expert_layers,
    own_plan_problems,
)
from omnitrain.parallel.lora import adapters_for, lora_problems
from omnitrain.parallel.recompute import SAVED_OPS, find_op
from omnitrain.parallel.routers import find_router
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.tensor.plan import TensorPlan, tensor_plan
from omnitrain.parallel.ulysses import head_problem
from omnitrain.parallel.units import blocks_of, stays_fp32
from omnitrain.plan.mesh import fit_mesh
from omnitrain.recipe.globs import matches
from omnitrain.recipe.parallel import (
    AXES,
    FOUNDATION,
    ComponentPlan,
    OffloadedTensor,
    ParallelPlan,
    Precision,
    RecomputedPart,
    raise_problems,
)

_MISSING_AXES = {
    "pp": "pipeline parallelism",
}
_MODEL_AXES = ("pp", "cp", "ulysses")  # of the foundation; other components lie beside it with degree 1
_STATE_AXIS = {"ulysses": "sp"}  # where the state has another name for it


@dataclass(frozen=True)
class CallFlags:
    """What the call of ``build_parallelize_model`` says of all components, where their plans say nothing.

    A flag that is not at its default counts as set: a plan that says otherwise contradicts it.

    Attributes:
        mixed_precision: compute in bf16; None: in the dtype of the parameters, which contradicts no plan.
        recompute: all blocks.
        parameter_offload: of what is sharded.
    """

    mixed_precision: bool | None = True
    recompute: bool = False
    parameter_offload: bool = False


def resolve_plans(
    model: OmniModel,
    plan: ParallelPlan,
    state: ParallelState,
    flags: CallFlags,
    tensors: TensorPlan | None = None,
) -> dict[str, ComponentPlan]:
    """The plan of every component with all fields set, except ``precision.param`` of what keeps its dtypes.

    Raises:
        PlanError: everything that contradicts the model, the state, the call or itself, at once. Nothing of the
            model is changed before.
    """
    components, frozen = model.components, _frozen(model)
    names = _names(model)
    problems = plan.problems(names, frozen=frozen, degrees=_degrees_of(state))
    problems += _missing_problems(plan, state)
    tensors = tensors or tensor_plan(model, plan, state.size("tp"))
    blocks, layers = blocks_of(model), expert_layers(model)
    adapters, wrong = adapters_for(model, plan)
    unfit = list(lora_problems(adapters_of(model) | adapters, layers, plan, state))
    problems += [*wrong, *(unfit or tensors.problems)]  # adapters are no matrices that a tensor parallel plan knows
    problems += _sequence_problems(model, plan, state)
    problems += _left_out_problems(model, state)
    problems += _tower_problems(model, plan, state)
    problems += ep_plan_problems(layers, _matching(plan.ep_plan or {}, names))
    problems += _spread_problems(model, layers, plan, state)
    plans = {}
    for name in components:
        tp = state.size("tp") if name == FOUNDATION or name in tensors.components else 1
        spread = chosen_layers(model, layers[name], plan.ep_plan)
        resolving = _Resolving(
            name, plan, state, flags, name in frozen, bool(blocks[name]), tp, spread, name in adapters
        )
        found = resolving.plan()
        problems += resolving.problems
        if found is not None:
            plans[name] = found
            problems += () if name in adapters else _fp32_problems(model, name, found)
            problems += _router_problems(model, plan, name, layers[name], found)
    raise_problems(problems or list(_unused_problems(plan, plans)))
    return plans


def require_parts(model: OmniModel, plan: ParallelPlan) -> None:
    """The part of :func:`resolve_plans` that is the same for any number of ranks.

    Raises:
        PlanError: the plan names components or modules that the model does not have, or trains what is frozen.
    """
    problems = plan.problems(_names(model), frozen=_frozen(model))
    raise_problems([*problems, *adapters_for(model, plan)[1]])


def _frozen(model: OmniModel) -> list[str]:
    return [name for name, own in model.components.items() if not any(p.requires_grad for p in own.values())]


def _names(model: OmniModel) -> dict[str, list[str]]:
    """Component -> its modules and parameters, relative to it."""
    names = {}
    for component, parameters in model.components.items():
        root = component if component in (FOUNDATION, *model.encoder_names, *model.decoder_names) else FOUNDATION
        paths = [path.removeprefix(f"{root}.") for path in parameters]
        modules = {path.rsplit(".", cut)[0] for path in paths for cut in range(1, path.count(".") + 1)}
        names[component] = [*paths, *sorted(modules)]
    return names


def _matching(globs: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    every_name = [name for own in names.values() for name in own]
    return {glob: dim for glob, dim in globs.items() if any(matches(glob, name) for name in every_name)}


def _degrees_of(state: ParallelState) -> dict[str, int]:
    return {axis: state.size(_STATE_AXIS.get(axis, axis)) for axis in AXES}


def _missing_problems(plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    for axis, what in _MISSING_AXES.items():
        places = {"default": plan.default, **{f"components.{name}": own for name, own in plan.components.items()}}
        found = {f"{place}.{axis}": getattr(own, axis) or 1 for place, own in places.items()}
        if max(found.values()) == 1:
            found["parallel state"] = state.size(_STATE_AXIS.get(axis, axis))
        for path, degree in found.items():
            if degree > 1:
                yield f"{path}: found {axis} {degree}, but {what} is not available yet; use 1"


def _spread_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan, state: ParallelState
) -> Iterator[str]:
    """A model without experts has nothing to spread, and one rank nowhere to."""
    if state.size("ep") == 1:
        if plan.ep_plan:
            yield "ep_plan: found with ep 1, which spreads nothing; set ep above 1, or remove it"
        return
    yield from own_plan_problems(model, layers, plan)
    if not any(layers.values()):
        yield (
            f"{plan.path_of(FOUNDATION, 'ep')}.ep: found {state.size('ep')}, but no part of the model has experts that "
            f"ask transformers' ExpertsInterface ({type(model.foundation).__name__} is dense or keeps its own); use 1"
        )


def _sequence_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """Ranks share the foundation's sequence if that may lie on several ranks and its heads divide."""
    if state.size("sequence") == 1:
        return
    found = sequence_contract_of(model.foundation, model.runner.contract)
    if found.problem:
        kind = type(model.foundation).__name__
        yield f"parallel state: found {state.shape}, but ranks cannot share a sequence of {kind}: {found.problem}"
    config = model.foundation.config
    dropped = [name for name in drawn_in_training(config) if re.search(r"att.*drop", name)]
    if state.size("cp") > 1 and dropped:
        yield (
            f"parallel state: found {state.shape}, but attention around a ring does not honour dropout "
            f"({', '.join(dropped)} in the foundation's config); set cp to 1, or that to 0"
        )
    for heads in found.heads:
        if not heads % state.size("tp") and (problem := head_problem(heads // state.size("tp"), state.size("sp"))):
            yield f"parallel state: found {state.shape}: {problem}"


def _left_out_problems(model: OmniModel, state: ParallelState) -> Iterator[str]:
    """Ranks must call the same modules, whatever their samples are."""
    for found in model.runner.contract.left_out if state.size("loss") > 1 else ():
        if found.problem:
            yield (
                f"parallel state: found {state.shape}, but only some samples call {found.module} of "
                f"{type(model.foundation).__name__}, and other ranks would wait for it: {found.problem}; use one rank"
            )


def _tower_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """The ranks that share the foundation's sequence may share each call of a tower, too, if it permits that."""
    ranks = state.size("sequence")
    for name, own in plan.components.items():
        if name == FOUNDATION or name not in model.components:
            continue
        path, instead = f"components.{name}", "remove it (`place: group` shares whole items among these ranks)"
        if (own.cp or 1) > 1:
            yield f"{path}.cp: found {own.cp}, but only the foundation has a ring; {instead}"
        if (own.ulysses or 1) == 1:
            continue
        found = f"{path}.ulysses: found {own.ulysses}"
        if own.ulysses != ranks:
            allowed = f"use 1 or {ranks}" if ranks > 1 else "set ulysses or cp of the foundation, or remove it"
            yield f"{found}, but {_counted(ranks)} a sequence of the foundation ({state.shape}); {allowed}"
        elif own.place in ("local", "world"):
            yield f"{found} with `place: {own.place}`; the ranks that share a sequence share each item: remove one"
        elif (contract := _tower_contract(model, name)).problem:
            yield f"{found}, but ranks cannot share an item of {name}: {contract.problem}; {instead}"
        else:
            yield from (f"{found}: {problem}" for n in contract.heads if (problem := head_problem(n, ranks)))


def _counted(ranks: int) -> str:
    return "no ranks share" if ranks == 1 else f"{ranks} ranks share"


def _tower_contract(model: OmniModel, component: str) -> SequenceContract:
    if component in model.encoder_names:
        return attached_tower_contract(model.encoders[component])
    if component in model.decoder_names:
        return SequenceContract("it is a decoder")
    return native_tower_contract(model.foundation, model.runner.contract, component)


def _fp32_problems(model: OmniModel, component: str, plan: ComponentPlan) -> Iterator[str]:
    """Parameters that must stay fp32 and train have to be in modules of their own: a unit has one dtype."""
    keep = stays_fp32(model)
    own = [name for name, p in model.components[component].items() if p.requires_grad]
    kept = {name for name in own if keep(name)}
    assert plan.precision is not None
    if kept and plan.precision.compute != "float32":
        for name in sorted(kept):
            beside = [other for other in own if other.rpartition(".")[0] == name.rpartition(".")[0]]
            if not kept.issuperset(beside):
                yield (
                    f"components.{component}.precision: {name} must stay float32 beside parameters that are not; "
                    "use compute: float32, or freeze it"
                )


def _router_problems(
    model: OmniModel, plan: ParallelPlan, component: str, layers: Sequence[ExpertLayer], found: ComponentPlan
) -> Iterator[str]:
    """Routers are found by what a model declares of them."""
    for layer in layers if "router" in (found.recomputed_parts or ()) else ():
        if find_router(model, layer.name.rpartition(".")[0]) is None:
            yield (
                f"{plan.path_of(component, 'recompute')}.recomputed_parts: found router, but "
                f"{type(model.foundation).__name__} declares none beside {layer.name} to transformers; name the others"
            )
            return


# Fields of experts that a component without them ignores where they come from the default plan.
_OF_EXPERTS = {
    "expert_rows": "has experts",
    "offloaded_tensors": "has experts and keeps them",
    "recomputed_parts": "has such parts",
    "expert_chunks": "has experts that are spread (ep 1)",
    "delay_wgrad": "has experts that are spread (ep 1)",
}


def _unused_problems(plan: ParallelPlan, plans: Mapping[str, ComponentPlan]) -> Iterator[str]:
    """A default that no component takes does nothing."""
    for field, what in _OF_EXPERTS.items():
        found = getattr(plan.default, field)
        if found not in (None, 1, False) and not any(getattr(own, field) for own in plans.values()):
            yield f"default.{field}: found {found}, but no component {what}; remove it"


class _Resolving:
    """One component, and the problems met on the way."""

    def __init__(
        self,
        name: str,
        plan: ParallelPlan,
        state: ParallelState,
        flags: CallFlags,
        frozen: bool,
        has_blocks: bool,
        tp: int,
        expert_layers: Sequence[ExpertLayer],
        has_adapters: bool,
    ) -> None:
        self.problems: list[str] = []
        self._name = name
        self._plans = plan
        self._own = plan.components.get(name, ComponentPlan())
        self._merged = plan.of(name)
        self._state = state
        self._flags = flags
        self._frozen = frozen
        self._has_blocks = has_blocks
        self._tp = tp
        self._expert_layers = expert_layers
        self._has_adapters = has_adapters

    def plan(self) -> ComponentPlan | None:
        degrees = self._degrees()
        ep = self._ep(degrees)
        recompute = self._recompute()
        precision = self._precision()
        parameter_offload = self._parameter_offload(degrees[0] if degrees else None)
        offload = self._only_blocks("activation_offload", bool(self._merged.activation_offload))
        compile_ = self._compile(offload)
        async_ulysses = self._of_foundation("async_ulysses", "sp", "ulysses")
        sequence_parallel = self._of_foundation("sequence_parallel", "tp", "tp")
        expert_rows = self._expert_rows()
        expert_chunks, delay_wgrad = self._overlap_of_experts(ep)
        if degrees is None or self.problems:
            return None
        mode, dp_replicate, dp_shard = degrees
        return ComponentPlan(
            mode=mode,
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            tp=self._tp,
            ep=ep,
            **self._sequence_degrees(),
            precision=precision,
            **recompute,
            offloaded_tensors=self._offloaded_tensors(),
            activation_offload=offload,
            parameter_offload=parameter_offload,
            optimizer_offload=bool(self._merged.optimizer_offload) and not self._is_frozen,
            freeze=self._is_frozen,
            lora=self._merged.lora if self._has_adapters else None,
            compile=compile_,
            async_ulysses=async_ulysses,
            sequence_parallel=sequence_parallel,
            expert_rows=expert_rows,
            expert_chunks=expert_chunks,
            delay_wgrad=delay_wgrad,
            place=self._merged.place or ("group" if self._state.size("sequence") > 1 else "local"),
        )

    def _sequence_degrees(self) -> dict[str, int]:
        """Of the foundation those of the state; other components are whole for each of its parts, or say otherwise."""
        found = {axis: self._state.size(_STATE_AXIS.get(axis, axis)) for axis in _MODEL_AXES}
        return found if self._is_foundation else dict.fromkeys(found, 1) | {"ulysses": self._own.ulysses or 1}

    @property
    def _is_foundation(self) -> bool:
        return self._name == FOUNDATION

    @property
    def _is_frozen(self) -> bool:
        return not self._has_adapters and (self._frozen or bool(self._merged.freeze))

    def _problem(self, field: str, text: str) -> None:
        self.problems.append(f"{self._plans.path_of(self._name, field)}.{field}: {text}")

    def _degrees(self) -> tuple[str, int, int] | None:
        """Mode, copies, ranks of a copy; None: they do not fit.

        The degrees of the foundation, and those that components take over from the default plan, multiply to the ranks
        with samples of their own: those that share a sequence share a copy. A component that says them itself divides
        all ranks over which losses add up.
        """
        fields = ("mode", "dp_replicate", "dp_shard")
        mode, replicate, shard = (getattr(self._merged, field) for field in fields)
        if mode is None and replicate is None and shard is None:
            if self._state.dp_mode == "replicate":
                return "replicate", self._state.size("loss"), 1
            own = (self._state.shape.dp_replicate, self._state.size("fsdp"))
            return _mode_of(*own), *own
        where = self._plans.path_of(self._name, *fields)
        is_data = self._is_foundation or where == "default"
        ranks = self._state.size("dp" if is_data else "loss")
        if mode == "hsdp" and replicate is None and shard is None:
            self.problems.append(f"{where}.mode: hsdp needs dp_replicate or dp_shard; they multiply to {ranks} ranks")
            return None
        try:
            shape = fit_mesh(
                ranks,
                dp_replicate=1 if mode == "fsdp2" else replicate,
                dp_shard=1 if mode == "replicate" else shard,
            )
        except UserError as error:
            self.problems.append(f"{where}: {' '.join(str(error).split())}")
            return None
        found = (shape.dp_replicate, shape.dp_shard)
        state = self._state.shape
        if self._is_foundation and found != (state.dp_replicate, state.dp_shard):
            self.problems.append(
                f"{where}: found {found[0]} x {found[1]} (dp_replicate x dp_shard), but the parallel state has "
                f"{state.dp_replicate} x {state.dp_shard}; set it in one place"
            )
            return None
        if mode == "replicate":
            return mode, self._state.size("loss"), 1
        if is_data:
            found = (found[0], found[1] * self._state.size("sequence"))
        return mode or _mode_of(*found), *found

    def _ep(self, degrees: tuple[str, int, int] | None) -> int:
        """Ranks over which the component's experts are spread: those of the state, or 1."""
        there = self._state.size("ep")
        wanted = self._merged.ep or there
        if not self._expert_layers:
            if (self._own.ep or 1) > 1 and self._name != FOUNDATION:
                self._problem("ep", f"found {wanted}, but the component has no experts; use 1, or remove it")
            return 1
        if wanted == 1:
            return 1
        if wanted != there:
            allowed = " or ".join(map(str, sorted({1, there})))
            self._problem("ep", f"found {wanted}, but the parallel state has {there}; use {allowed}")
            return 1
        if degrees is not None and degrees[1:] != (self._state.shape.dp_replicate, self._state.size("fsdp")):
            self._problem(
                "dp_replicate",
                f"found {degrees[1]} x {degrees[2]} (dp_replicate x dp_shard) with ep {wanted}; experts that are "
                "spread lie as the parallel state says: remove it, or use ep: 1",
            )
        for layer in self._expert_layers:
            if layer.num_experts % wanted:
                fitting = [n for n in range(1, layer.num_experts + 1) if layer.num_experts % n == 0]
                self._problem(
                    "ep",
                    f"found {wanted}, which does not divide the {layer.num_experts} experts of {layer.name}; "
                    f"{', '.join(map(str, fitting))} would",
                )
                break
        return wanted

    def _expert_rows(self) -> int | None:
        if self._own.expert_rows and not self._expert_layers:
            self._problem("expert_rows", f"found {self._own.expert_rows}, but the component has no experts; remove it")
        if not self._expert_layers or self._merged.expert_rows is None:
            return None
        self._require_own_products("expert_rows", self._merged.expert_rows)
        return self._merged.expert_rows

    def _require_own_products(self, field: str, found: object) -> None:
        """What no products but ours can do."""
        for backend in sorted({layer.backend for layer in self._expert_layers} - {AUTO, "torch"}):
            self._problem(
                field,
                f"found {found}, but experts backend {backend} computes all rows at once and keeps what it keeps; use "
                "the backend auto or torch, or remove it",
            )

    def _overlap_of_experts(self, ep: int) -> tuple[int | None, bool | None]:
        """Chunks of a rank's experts, and whether their weights' gradients are delayed."""
        for field in ("expert_chunks", "delay_wgrad"):
            if getattr(self._own, field) not in (None, 1, False) and ep == 1:
                self._problem(field, f"found {getattr(self._own, field)} with ep 1, where no row travels; remove it")
        if ep == 1:
            return None, None
        chunks = self._merged.expert_chunks or 1
        fewest = min(layer.num_experts for layer in self._expert_layers) // ep
        if chunks > max(fewest, 1):
            self._problem(
                "expert_chunks", f"found {chunks}, but a rank has {fewest} experts of a layer; use 1 to {fewest}"
            )
        if self._merged.delay_wgrad:
            self._require_own_products("delay_wgrad", "true")
        return chunks, bool(self._merged.delay_wgrad)

    def _precision(self) -> Precision:
        given = self._merged.precision or Precision()
        param = given.param or (None if self._is_frozen or self._has_adapters else "float32")
        if self._flags.mixed_precision is False and given.compute not in (None, given.param or "float32"):
            self._problem("precision", f"found compute {given.compute}, but enable_mixed_precision is False")
        low = "bfloat16" if self._flags.mixed_precision else param
        return Precision(param=param, compute=given.compute or low, reduce=given.reduce or "float32")

    def _recompute(self) -> dict[str, Any]:
        """What is computed again, by field."""
        found = self._merged.recompute
        if self._flags.recompute and found == "none":
            self._problem("recompute", "found none, but enable_gradient_checkpointing is True; set it in one place")
        if self._flags.recompute and found is None:
            self._require_no_other_use_of_blocks()
        wanted = found or ("full" if self._flags.recompute else "none")
        if wanted == "none" or not self._only_blocks("recompute", True):
            return {"recompute": "none"}
        if wanted == "selective":
            return {"recompute": wanted, "saved_ops": self._saved_ops()}
        if wanted == "parts":
            return {"recompute": wanted, "recomputed_parts": self._recomputed_parts()}
        return {"recompute": wanted}

    def _require_no_other_use_of_blocks(self) -> None:
        """Of what the call wants recomputed, where the plan does not say it."""
        if self._merged.compile and self._is_foundation:
            self._problem("compile", "found true, but enable_gradient_checkpointing is True; use one")
        if self._merged.offloaded_tensors and self._expert_layers:
            self._problem(
                "offloaded_tensors",
                "set, but enable_gradient_checkpointing is True, which does not keep them; use `recompute: parts`",
            )

    def _saved_ops(self) -> list[str]:
        if self._merged.saved_ops is None:
            return [op for op in SAVED_OPS if find_op(op) is not None]
        for op in self._merged.saved_ops:
            if find_op(op) is None:
                self._problem("saved_ops", f"torch has no op {op!r}; expected one such as {', '.join(SAVED_OPS[:3])}")
        return self._merged.saved_ops

    def _recomputed_parts(self) -> list[RecomputedPart]:
        possible: list[RecomputedPart] = ["attention", "router", "expert_activation"]
        if not self._expert_layers:
            possible = ["attention"]
        wanted = self._merged.recomputed_parts if self._merged.recomputed_parts is not None else possible
        for part in self._own.recomputed_parts or ():
            if part not in possible:
                self._problem("recomputed_parts", f"found {part}, but the component has no experts; remove it")
        if "expert_activation" in wanted:
            self._require_own_products("recomputed_parts", "expert_activation")
        return [part for part in wanted if part in possible]

    def _offloaded_tensors(self) -> list[OffloadedTensor] | None:
        if self._own.offloaded_tensors and not self._expert_layers:
            found = ", ".join(self._own.offloaded_tensors)
            self._problem("offloaded_tensors", f"found {found}, but the component has no experts; remove it")
        return self._merged.offloaded_tensors if self._expert_layers else None

    def _only_blocks(self, field: str, wanted: bool) -> bool:
        """``wanted``, as far as the component has blocks; to ask one without blocks for it by name is a mistake."""
        if wanted and not self._has_blocks and getattr(self._own, field):
            self._problem(field, "the component has no blocks that transformers could recompute; remove it")
        return wanted and self._has_blocks

    def _parameter_offload(self, mode: str | None) -> bool:
        found = self._merged.parameter_offload
        if self._flags.parameter_offload and found is False:
            self._problem("parameter_offload", "found false, but enable_fsdp_offload is True; set it in one place")
        if found and mode == "replicate":
            self._problem("parameter_offload", "found true, but the component is replicated; only shards can be")
        return bool(found or (found is None and self._flags.parameter_offload)) and mode != "replicate"

    def _of_foundation(self, field: str, axis: str, key: str) -> bool:
        """A switch that only the foundation has, and that does nothing without an axis."""
        if getattr(self._own, field) and not self._is_foundation:
            self._problem(field, f"only the foundation's sequences are shared; set it on {FOUNDATION}")
        wanted = bool(getattr(self._merged, field)) and self._is_foundation
        if wanted and self._state.size(axis) == 1:
            self._problem(field, f"found true with {key} 1, where it does nothing; set {key} above 1, or remove it")
        return wanted

    def _compile(self, offload: bool) -> bool:
        if self._own.compile and self._name != FOUNDATION:
            self._problem("compile", f"only the foundation can be compiled; set it on {FOUNDATION}")
        wanted = bool(self._merged.compile) and self._name == FOUNDATION
        if wanted and offload:
            self._problem("compile", "compiled blocks cannot offload activations yet; remove one of the two")
        return self._only_blocks("compile", wanted)


def _mode_of(dp_replicate: int, dp_shard: int) -> str:
    if dp_replicate == 1:
        return "fsdp2"
    return "replicate" if dp_shard == 1 else "hsdp"


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that a plan names."""
    return None if name is None else getattr(torch, name)
