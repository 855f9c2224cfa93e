"""One complete plan per component, from what the plan, the parallel state and the call say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from omnitrain.errors import UserError
from omnitrain.models.omni import OmniModel
from omnitrain.parallel.recompute import SAVED_OPS, find_op
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.units import blocks_of, stays_fp32
from omnitrain.plan.mesh import fit_mesh
from omnitrain.recipe.parallel import AXES, FOUNDATION, ComponentPlan, ParallelPlan, Precision, raise_problems

_MISSING_AXES = {
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
    "pp": "pipeline parallelism",
}
_MODEL_AXES = ("pp", "cp", "ulysses", "tp", "ep")
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
    model: OmniModel, plan: ParallelPlan, state: ParallelState, flags: CallFlags
) -> dict[str, ComponentPlan]:
    """The plan of every component with all fields set, except ``precision.param`` of what keeps its dtypes.

    Raises:
        RecipeError: everything that contradicts the model, the state, the call or itself, at once. Nothing of the
            model is changed before.
    """
    components = model.components
    frozen = [name for name, own in components.items() if not any(p.requires_grad for p in own.values())]
    problems = plan.problems(_names(model), frozen=frozen, degrees=_degrees_of(state))
    problems += _missing_problems(plan, state)
    blocks = blocks_of(model)
    plans = {}
    for name in components:
        resolving = _Resolving(name, plan, state, flags, name in frozen, bool(blocks[name]))
        found = resolving.plan()
        problems += resolving.problems
        if found is not None:
            plans[name] = found
            problems += _fp32_problems(model, name, found)
    raise_problems(problems)
    return plans


def _names(model: OmniModel) -> dict[str, list[str]]:
    """Component -> its modules and parameters, relative to it."""
    names = {}
    for component, parameters in model.components.items():
        root = component if component in (FOUNDATION, *model.encoder_names, *model.decoder_names) else FOUNDATION
        paths = [path.removeprefix(f"{root}.") for path in parameters]
        modules = {path.rsplit(".", cut)[0] for path in paths for cut in range(1, path.count(".") + 1)}
        names[component] = [*paths, *sorted(modules)]
    return names


def _degrees_of(state: ParallelState) -> dict[str, int]:
    return {axis: state.size(_STATE_AXIS.get(axis, axis)) for axis in AXES}


def _missing_problems(plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    for axis, what in _MISSING_AXES.items():
        places = {"default": plan.default, **{f"components.{name}": own for name, own in plan.components.items()}}
        found = {f"{place}.{axis}": getattr(own, axis) for place, own in places.items()}
        found["parallel state"] = state.size(_STATE_AXIS.get(axis, axis))
        for path, degree in found.items():
            if (degree or 1) > 1:
                yield f"{path}: found {axis} {degree}, but {what} is not available yet; use 1"
    for field, axis in (("tp_plan", "tp"), ("ep_plan", "ep")):
        if getattr(plan, field):
            yield f"{field}: {_MISSING_AXES[axis]} is not available yet; remove it"


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


class _Resolving:
    """One component, and the problems met on the way."""

    def __init__(
        self, name: str, plan: ParallelPlan, state: ParallelState, flags: CallFlags, frozen: bool, has_blocks: bool
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

    def plan(self) -> ComponentPlan | None:
        degrees = self._degrees()
        recompute, saved_ops = self._recompute()
        precision = self._precision()
        parameter_offload = self._parameter_offload(degrees[0] if degrees else None)
        offload = self._only_blocks("activation_offload", bool(self._merged.activation_offload))
        compile_ = self._compile(offload)
        if degrees is None or self.problems:
            return None
        mode, dp_replicate, dp_shard = degrees
        return ComponentPlan(
            mode=mode,
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            **self._model_degrees(),
            precision=precision,
            recompute=recompute,
            saved_ops=saved_ops,
            activation_offload=offload,
            parameter_offload=parameter_offload,
            optimizer_offload=bool(self._merged.optimizer_offload) and not self._is_frozen,
            freeze=self._is_frozen,
            compile=compile_,
            place=self._merged.place or ("group" if self._state.size("sequence") > 1 else "local"),
        )

    def _model_degrees(self) -> dict[str, int]:
        """Of the foundation those of the state; other components lie beside it, whole for each of its parts."""
        found = {axis: self._state.size(_STATE_AXIS.get(axis, axis)) for axis in _MODEL_AXES}
        return found if self._is_foundation else dict.fromkeys(found, 1)

    @property
    def _is_foundation(self) -> bool:
        return self._name == FOUNDATION

    @property
    def _is_frozen(self) -> bool:
        return self._frozen or bool(self._merged.freeze)

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

    def _precision(self) -> Precision:
        given = self._merged.precision or Precision()
        param = given.param or (None if self._is_frozen else "float32")
        if self._flags.mixed_precision is False and given.compute not in (None, given.param or "float32"):
            self._problem("precision", f"found compute {given.compute}, but enable_mixed_precision is False")
        low = "bfloat16" if self._flags.mixed_precision else param
        return Precision(param=param, compute=given.compute or low, reduce=given.reduce or "float32")

    def _recompute(self) -> tuple[str, list[str] | None]:
        found = self._merged.recompute
        if self._flags.recompute and found == "none":
            self._problem("recompute", "found none, but enable_gradient_checkpointing is True; set it in one place")
        wanted = found or ("full" if self._flags.recompute else "none")
        if wanted == "none" or not self._only_blocks("recompute", True):
            return "none", None
        if wanted == "full":
            return wanted, None
        if self._merged.saved_ops is None:
            return wanted, [op for op in SAVED_OPS if find_op(op) is not None]
        for op in self._merged.saved_ops:
            if find_op(op) is None:
                self._problem("saved_ops", f"torch has no op {op!r}; expected one such as {', '.join(SAVED_OPS[:3])}")
        return wanted, self._merged.saved_ops

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
