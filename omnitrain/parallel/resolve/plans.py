"""One complete plan per component, from what the plan, the parallel state and the call say of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, adapters_of, names_without_adapters, root_of
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.adapter_plan import adapters_for, lora_problems
from omnitrain.parallel.expert.apply import chosen_layers, ep_plan_problems, expert_layers
from omnitrain.parallel.fsdp.units import blocks_of, stays_fp32
from omnitrain.parallel.resolve.checks import model_problems
from omnitrain.parallel.resolve.component import component_plan
from omnitrain.parallel.resolve.experts import router_problems, unused_problems
from omnitrain.parallel.resolve.sources import STATE_AXIS, Asked, CallFlags
from omnitrain.parallel.state import ParallelState, state_without_groups
from omnitrain.parallel.tensor.plan import TensorPlan, tensor_plan
from omnitrain.recipe.globs import matches
from omnitrain.recipe.parallel import AXES, FOUNDATION, ComponentPlan, ParallelPlan, PlanError, raise_problems


def resolve_plans(
    model: OmniModel,
    plan: ParallelPlan,
    state: ParallelState,
    flags: CallFlags,
    tensors: TensorPlan,
    present: Mapping[str, Adapters],
) -> tuple[dict[str, ComponentPlan], dict[str, Adapters]]:
    """The plan of every component with all fields set, except ``precision.param`` of what keeps its dtypes.

    And component -> the adapters that its plan asks for.

    Args:
        model: not laid out.
        plan: what the user says of its components.
        state: the ranks.
        flags: what the call says of all components.
        tensors: what tensor parallelism does to the model.
        present: component -> the adapters that it has, or gets with its weights.

    Raises:
        PlanError: everything that contradicts the model, the state, the call or itself, at once. Nothing of the
            model is changed before.
    """
    components, frozen = model.components, _frozen(model)
    names = _names(model)
    problems = plan.problems(names, frozen=frozen, degrees=_degrees_of(state))
    blocks, layers = blocks_of(model), expert_layers(model)
    adapters, wrong = adapters_for(model, plan, present)
    problems += [*wrong, *lora_problems({**present, **adapters}, layers, plan), *tensors.problems]
    problems += model_problems(model, layers, plan, state)
    problems += ep_plan_problems(layers, _matching(plan.ep_plan or {}, names))
    plans = {}
    for name in components:
        tp = state.size("tp") if name == FOUNDATION or name in tensors.components else 1
        spread = chosen_layers(model, layers[name], plan.ep_plan)
        asked = Asked(name, plan, state, flags, name in frozen, bool(blocks[name]), tp, spread, name in adapters)
        found = component_plan(asked)
        problems += asked.problems
        if found is not None:
            plans[name] = found
            problems += () if name in adapters else _fp32_problems(model, name, found)
            problems += router_problems(model, plan, name, layers[name], found)
    raise_problems(problems or list(unused_problems(plan, plans)))
    return plans, adapters


def require_fit(model: OmniModel, plan: ParallelPlan, mixed_precision: bool | None) -> None:
    """The plan fits the model on some number of ranks; its degrees are all there are.

    Args:
        model: not laid out, on any device; it stays as it is.
        plan: of a recipe.
        mixed_precision: see :class:`CallFlags`.

    Raises:
        PlanError: what contradicts it on the number of ranks that fits it best.
        UserError: its degrees contradict each other.
    """
    refused: list[UserError] = []
    for number in _numbers_of_ranks(plan):
        try:
            state = state_without_groups(plan, number)
            tensors = tensor_plan(model, plan, state.size("tp"))
            resolve_plans(model, plan, state, CallFlags(mixed_precision), tensors, adapters_of(model))
            return
        except UserError as error:
            refused.append(error)
            if len(refused) > 1 and str(refused[-2]) == str(error):
                break  # the number of ranks changes nothing
    plans = [error for error in refused if isinstance(error, PlanError)]
    raise min(plans, key=lambda error: len(error.args)) if plans else refused[0]


def _numbers_of_ranks(plan: ParallelPlan) -> list[int]:
    """On which to try a plan: those that its degrees multiply to, and multiples where some are left open."""
    own = plan.of(FOUNDATION)
    if own.num_ranks is not None:
        return [own.num_ranks]
    matrices = (own.tp or 1) * (own.pp or 1)
    least = math.lcm(matrices * (own.cp or 1) * (own.ulysses or 1), matrices * (own.ep or 1)) * (own.dp_replicate or 1)
    others = {math.lcm(least, found) for name in plan.components if (found := plan.of(name).num_ranks)}
    return sorted({least << doublings for doublings in range(3)} | others)


def _frozen(model: OmniModel) -> list[str]:
    return [name for name, own in model.components.items() if not any(p.requires_grad for p in own.values())]


def _names(model: OmniModel) -> dict[str, list[str]]:
    """Component -> its modules and parameters, relative to it, as they are called without adapters."""
    names = {}
    for component, parameters in model.components.items():
        root = f"{root_of(model, component)}."
        paths = [path.removeprefix(root) for path in names_without_adapters(model, parameters)]
        modules = {path.rsplit(".", cut)[0] for path in paths for cut in range(1, path.count(".") + 1)}
        names[component] = [*paths, *sorted(modules)]
    return names


def _matching(globs: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    every_name = [name for own in names.values() for name in own]
    return {glob: dim for glob, dim in globs.items() if any(matches(glob, name) for name in every_name)}


def _degrees_of(state: ParallelState) -> dict[str, int]:
    return {axis: state.size(STATE_AXIS.get(axis, axis)) for axis in AXES}


def _fp32_problems(model: OmniModel, component: str, plan: ComponentPlan) -> Iterator[str]:
    """Parameters that must stay fp32 and train have to be in modules of their own: a unit has one dtype."""
    keep = stays_fp32(model)
    own = [name for name, p in model.components[component].items() if p.requires_grad]
    kept = {name for name in own if keep(name)}
    assert plan.precision is not None
    if kept and plan.precision.compute != "float32":
        in_forward = set(model.runner.in_forward.parameters)
        for name in sorted(name for name in kept if model.components[component][name] in in_forward):
            yield (
                f"components.{component}.precision: {name} must stay float32, and only some samples reach it in the "
                "foundation's own forward; use compute: float32, or freeze it"
            )
        for name in sorted(kept):
            beside = [other for other in own if other.rpartition(".")[0] == name.rpartition(".")[0]]
            if not kept.issuperset(beside):
                yield (
                    f"components.{component}.precision: {name} must stay float32 beside parameters that are not; "
                    "use compute: float32, or freeze it"
                )


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that a plan names."""
    return None if name is None else getattr(torch, name)
