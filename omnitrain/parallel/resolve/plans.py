"""Merge the plan, the parallel state and the call's flags into one complete plan per component."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

import torch

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, adapters_of, names_without_adapters, root_of
from omnitrain.models.contract.checks_precision import precision_problem_of
from omnitrain.models.hf.compute_dtype import stays_fp32
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.adapter_plan import adapters_for, lora_problems
from omnitrain.parallel.expert.apply import chosen_layers, ep_plan_problems, expert_layers
from omnitrain.parallel.fsdp.units import blocks_of
from omnitrain.parallel.resolve.checks import model_problems
from omnitrain.parallel.resolve.component import component_plan
from omnitrain.parallel.resolve.experts import router_problems, unused_problems
from omnitrain.parallel.resolve.roles import roles_of
from omnitrain.parallel.resolve.sections import divide_encoders, idle_settings, section_problems, starving_sections
from omnitrain.parallel.resolve.sources import STATE_AXIS, CallFlags, Request
from omnitrain.parallel.state import ParallelState, state_without_groups
from omnitrain.parallel.tensor.plan import TensorPlan, tensor_plan
from omnitrain.recipe.globs import matches_weight
from omnitrain.recipe.parallel import AXES, FOUNDATION, MAIN, ComponentPlan, ParallelPlan, PlanError, raise_problems


def resolve_plans(
    model: OmniModel,
    plan: ParallelPlan,
    state: ParallelState,
    flags: CallFlags,
    tensors: TensorPlan,
    present: Mapping[str, Adapters],
) -> tuple[dict[str, ComponentPlan], dict[str, Adapters]]:
    """Return component -> its complete plan, and component -> the adapters that its plan asks for, or raise PlanError.

    All fields are set, except ``precision.param`` where parameters keep their dtypes. ``present``: component -> the
    adapters that it has, or that its checkpoint adds. The error has all contradictions with the model, the state, the
    flags or itself.
    """
    components, names = model.components, _names(model)
    frozen = [name for name, parameters in components.items() if not any(p.requires_grad for p in parameters.values())]
    main = state.of_section(MAIN)
    degrees = {axis: main.size(STATE_AXIS.get(axis, axis)) for axis in AXES}
    raise_problems(section_problems(model, plan, state))
    problems = plan.problems(names, frozen=frozen, degrees=degrees)
    blocks, layers = blocks_of(model), expert_layers(model)
    adapters, adapter_problems = adapters_for(model, plan, present)
    problems += [*adapter_problems, *lora_problems({**present, **adapters}, layers, plan), *tensors.problems]
    problems += model_problems(model, layers, plan, main)
    globs = (plan.ep_plan or {}).items()  # those that match no name are problems of the plan itself
    known = {glob: dim for glob, dim in globs if any(matches_weight(glob, name) for name in chain(*names.values()))}
    problems += ep_plan_problems(layers, known)
    plans = {}
    for name in components:
        own = state.of_section(plan.section_of(name))
        tp = own.size("tp") if name == FOUNDATION else tensors.degrees.get(name, 1)
        request = Request(
            name,
            plan,
            own.with_tp(tp) if 1 < tp < own.size("tp") else own,
            flags,
            is_frozen_already=name in frozen,
            has_blocks=bool(blocks[name]),
            tp=tp,
            expert_layers=chosen_layers(model, layers[name], plan.ep_plan),
            has_adapters=name in adapters,
            roles=roles_of(model, plan, name),
        )
        resolved = component_plan(request)
        problems += request.problems
        if resolved is not None:
            plans[name] = resolved
            problems += () if name in adapters else _fp32_problems(model, name, resolved)
            problems += router_problems(model, plan, name, layers[name], resolved)
    problems += () if problems else _low_precision_problems(model, plans)  # measured in seconds
    starving = starving_sections(plan, plans, model.decoder_names, model.teachers)
    raise_problems(problems or [*unused_problems(plan, plans), *idle_settings(plan, plans), *starving])
    return plans, adapters


def resolve_without_ranks(
    model: OmniModel, plan: ParallelPlan, mixed_precision: bool | None, num_ranks: int | None = None
) -> tuple[ParallelState, dict[str, ComponentPlan]]:
    """Resolve a recipe's plan without process groups, with all degrees taken from the plan.

    ``num_ranks`` None: the first number that the plan fits. Raises PlanError: the plan does not fit the model; without
    ``num_ranks``, with the problems on the number of ranks with the fewest; UserError: the degrees of the plan
    contradict each other, or do not fit ``num_ranks``, with what does not fit the model on any number of ranks.
    """
    if num_ranks is not None:
        try:
            state = state_without_groups(plan, num_ranks)
        except UserError as error:
            raise UserError(*error.problems, *_problems_on_any(model, plan, mixed_precision)) from None
        return _resolved_on(state, model, plan, mixed_precision)
    errors: list[UserError] = []
    for ranks in _numbers_of_ranks(plan):
        try:
            return _resolved_on(state_without_groups(plan, ranks), model, plan, mixed_precision)
        except UserError as error:
            errors.append(error)
            if len(errors) > 1 and str(errors[-2]) == str(error):
                break  # another number of ranks gives the same error
    plan_errors = [error for error in errors if isinstance(error, PlanError)]
    raise min(plan_errors, key=lambda error: len(error.problems)) if plan_errors else errors[0]


def _resolved_on(
    state: ParallelState, model: OmniModel, plan: ParallelPlan, mixed_precision: bool | None
) -> tuple[ParallelState, dict[str, ComponentPlan]]:
    divide_encoders(model, plan)
    tensors = tensor_plan(model, plan, state.degrees("tp"))
    plans, _ = resolve_plans(model, plan, state, CallFlags(mixed_precision), tensors, adapters_of(model))
    return state, plans


def _problems_on_any(model: OmniModel, plan: ParallelPlan, mixed_precision: bool | None) -> Iterator[str]:
    """Yield the plan's problems with the model on the number of ranks with the fewest, with their keys in a recipe."""
    try:
        resolve_without_ranks(model, plan, mixed_precision)
    except PlanError as error:
        yield from error.under("parallel").problems
    except UserError:
        return  # the degrees fit no number of ranks


def _numbers_of_ranks(plan: ParallelPlan) -> list[int]:
    """Numbers of ranks to try a plan on: the product of its degrees, and multiples if some degrees are unset."""
    foundation, elsewhere = plan.of(FOUNDATION), sum(section.ranks for section in plan.sections.values())
    if foundation.num_ranks is not None:
        return [foundation.num_ranks + elsewhere]
    matrices = (foundation.tp or 1) * (foundation.pp or 1)
    sequence = (foundation.cp or 1) * (foundation.ulysses or 1)
    least = math.lcm(matrices * sequence, matrices * (foundation.ep or 1)) * (foundation.dp_replicate or 1)
    of_main = [plan.of(name).num_ranks for name in plan.components if plan.section_of(name) == MAIN]
    others = {math.lcm(least, ranks) for ranks in of_main if ranks}
    return [ranks + elsewhere for ranks in sorted({least << doublings for doublings in range(3)} | others)]


def _names(model: OmniModel) -> dict[str, list[str]]:
    """Component -> its modules and parameters, relative to it, with the names that they have without adapters."""
    names = {}
    for component, parameters in model.components.items():
        root = f"{root_of(model, component)}."
        paths = [path.removeprefix(root) for path in names_without_adapters(model, parameters)]
        modules = {path.rsplit(".", cut)[0] for path in paths for cut in range(1, path.count(".") + 1)}
        names[component] = [*paths, *sorted(modules)]
    return names


def _fp32_problems(model: OmniModel, component: str, plan: ComponentPlan) -> Iterator[str]:
    """An FSDP unit has one dtype, so a module cannot mix trained parameters that must stay fp32 with other ones."""
    parameters = {name: p for name, p in model.components[component].items() if p.requires_grad}
    fp32 = set(filter(stays_fp32(model), parameters))
    if not fp32 or plan.precision.compute == "float32":
        return
    in_forward = set(model.runner.in_forward.parameters)
    for name in sorted(filter(lambda name: parameters[name] in in_forward, fp32)):
        yield (
            f"components.{component}.precision: {name} must stay float32, and the foundation's forward uses it "
            "for some samples only; use compute: float32, or freeze it"
        )
    low = plan.precision.param not in (None, "float32")  # in storage, too
    for name in sorted(fp32):
        module = name.rpartition(".")[0]
        together = {other for other in parameters if other.startswith(f"{module}.")}
        if not low:  # with fp32 weights, it may compute in the dtype of the modules inside its own
            together = {other for other in together if other.rpartition(".")[0] == module}
        if together - fp32:
            yield (
                f"components.{component}.precision: {name} must stay float32, but other parameters of its module "
                f"do not; use {'param' if low else 'compute'}: float32, or freeze it"
            )


def _low_precision_problems(model: OmniModel, plans: Mapping[str, ComponentPlan]) -> Iterator[str]:
    """The foundation must compute in bf16 what transformers' model in bf16 computes."""
    dtypes = {name: plans[name].precision for name in model.foundation_components if name in plans}
    low = [name for name, own in dtypes.items() if "bfloat16" in (own.compute, own.param)]
    if low and (problem := precision_problem_of(model.foundation, model.runner.contract)):
        yield (
            f"components.{low[0]}.precision: found bfloat16, but {type(model.foundation).__name__} does not compute in "
            f"bf16 as transformers does: {problem}; use param: float32 and compute: float32"
        )


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of this name; None: None."""
    return None if name is None else getattr(torch, name)
