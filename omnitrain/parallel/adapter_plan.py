"""LoRA of a parallel plan: which adapters it asks for, and what it cannot be used with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, adapters_of, find_adapters, find_in_all
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import AUTO
from omnitrain.parallel.expert.apply import ExpertLayer
from omnitrain.recipe.lora import Lora
from omnitrain.recipe.parallel import FOUNDATION, ParallelPlan


def adapters_for(
    model: OmniModel, plan: ParallelPlan, present: Mapping[str, Adapters] | None = None
) -> tuple[dict[str, Adapters], list[str]]:
    """Component -> adapters, and what is wrong with the plan, a line each that begins with its key.

    The default plan's ``lora`` is for the components that have what it names. Those that a model has already are
    taken for a plan that asks for the same ones.

    Args:
        model: with adapters or without.
        plan: of its components.
        present: component -> the adapters that it has, or gets with its weights; None: those that it has.
    """
    found, problems = {}, []
    present = adapters_of(model) if present is None else present
    inheriting = [name for name in model.components if _is_default(plan, name)]
    asked: dict[str, tuple[str, Lora]] = {
        name: (f"components.{name}.lora", own.lora)
        for name, own in plan.components.items()
        if own.lora is not None and name in model.components
    }
    for name, (path, lora) in asked.items():
        if name in model.decoder_names:
            problems.append(f"{path}: decoders take no adapters; remove it, or train {name} whole")
            continue
        try:
            found[name] = find_adapters(model, name, lora)
        except UserError as error:
            problems += [f"{path}.targets: {line}" for line in str(error).splitlines()]
    if plan.default.lora is not None and inheriting:
        try:
            found |= find_in_all(model, inheriting, plan.default.lora)
        except UserError as error:
            problems += [f"default.lora.targets: {line}" for line in str(error).splitlines()]
    for name in found.keys() & present.keys():
        if found[name] != present[name]:
            problems.append(
                f"{plan.path_of(name, 'lora')}.lora: {name} has other adapters already ({present[name].summary}, and "
                f"the plan asks for {found[name].summary}); use the same, or a model without adapters"
            )
    return found, problems


def lora_problems(
    adapters: Mapping[str, Adapters],
    layers: Mapping[str, Sequence[ExpertLayer]],
    plan: ParallelPlan,
) -> Iterator[str]:
    """What ``adapters`` cannot be used with; ``layers``: of each component, those with experts."""
    for name, own in adapters.items():
        path = plan.path_of(name, "lora")
        for backend in sorted({layer.backend for layer in layers[name] if own.experts} - {AUTO, "torch"}):
            yield f"{path}.lora: found with experts backend {backend}, which knows no adapters; use auto or torch"
        if name == FOUNDATION and plan.of(FOUNDATION).async_ulysses:
            yield f"{path}.lora: found with async_ulysses, which drives projections without adapters; use one of them"


def _is_default(plan: ParallelPlan, component: str) -> bool:
    own = plan.components.get(component)
    return own is None or (own.lora is None and not own.freeze)
