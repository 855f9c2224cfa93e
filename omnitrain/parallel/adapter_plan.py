"""The LoRA adapters that a parallel plan asks for, and the settings that exclude them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, adapters_of, find_adapters, find_in_all, root_of
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.entry import AUTO
from omnitrain.parallel.expert.apply import ExpertLayer
from omnitrain.recipe.parallel import FOUNDATION, ParallelPlan


def adapters_for(
    model: OmniModel, plan: ParallelPlan, present: Mapping[str, Adapters] | None = None
) -> tuple[dict[str, Adapters], list[str]]:
    """Return component -> planned adapters, and the plan's problems, one line each that begins with the plan's key.

    The default plan's ``lora`` applies to the components that have its target modules. A model may have the planned
    adapters already, if they are the same. ``present``: component -> the adapters that it has, or that its checkpoint
    adds; None: those that it has.
    """
    adapters: dict[str, Adapters] = {}
    problems: list[str] = []
    present = adapters_of(model) if present is None else present
    own = {name: of_plan.lora for name, of_plan in plan.components.items() if name in model.components}
    explicit = {name: lora for name, lora in own.items() if lora is not None}
    frozen = {name for name, component in plan.components.items() if component.freeze}
    inheriting = [name for name in model.components if name not in (*explicit, *frozen, *model.teachers)]
    for name, lora in explicit.items():
        path = f"components.{name}.lora"
        if name in model.decoder_names:
            problems.append(f"{path}: decoders cannot have adapters; remove it to train all weights of {name}")
        elif name in model.teachers:
            problems.append(f"{path}: a teacher does not train; remove it")
        else:
            with _noted(problems, path):
                adapters[name] = find_adapters(model, name, lora)
    if plan.default.lora is not None and inheriting:
        with _noted(problems, "default.lora"):
            adapters |= find_in_all(model, inheriting, plan.default.lora)
    for name in adapters.keys() & present.keys():
        adapters[name] = replace(adapters[name], tokens=present[name].tokens)  # no plan chooses these
    problems += _differing_problems(model, adapters, present, plan)
    return adapters, problems


@contextmanager
def _noted(problems: list[str], path: str) -> Iterator[None]:
    """Add an error about target modules to the problems."""
    try:
        yield
    except UserError as error:
        problems += [f"{path}.targets: {line}" for line in str(error).splitlines()]


def lora_problems(
    adapters: Mapping[str, Adapters], layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan
) -> Iterator[str]:
    """Yield the settings that exclude ``adapters``; ``layers``: component -> its MoE layers."""
    for name, of_component in adapters.items():
        path = plan.path_of(name, "lora")
        for backend in sorted({layer.backend for layer in layers[name] if of_component.experts} - {AUTO, "torch"}):
            yield f"{path}.lora: experts backend {backend} does not support adapters; use the backend auto or torch"
        if name == FOUNDATION and plan.of(FOUNDATION).async_ulysses:
            yield f"{path}.lora: async_ulysses does not support adapters; use only one of the two"
        yield from _dropout_problems(f"{path}.lora.dropout", of_component, plan.of(name).tp or 1)
        precision = plan.of(name).precision
        if of_component.tokens and precision.param not in (None, "float32"):
            yield (
                f"{plan.path_of(name, 'precision')}.precision.param: found {precision.param}, but rows of new "
                f"tokens train (ids {', '.join(map(str, of_component.tokens))}), so the embeddings must be float32; "
                "remove it (`compute` may stay)"
            )
    for projector, tower in plan.reads().items():
        found = [(each.rank, each.alpha) for name in (projector, tower) if (each := adapters.get(name)) is not None]
        if len({*found}) > 1:
            (rank, alpha), (rank_of_tower, alpha_of_tower) = found
            yield (
                f"{plan.path_of(projector, 'lora')}.lora: found rank {rank} and alpha {alpha:g}, but {tower} has rank "
                f"{rank_of_tower} and alpha {alpha_of_tower:g}, and an encoder that is not divided has one rank and "
                "one alpha; use the same"
            )


def _dropout_problems(key: str, adapters: Adapters, tp: int) -> Iterator[str]:
    if adapters.dropout and adapters.experts:
        yield (
            f"{key}: found {adapters.dropout:g}, but fused experts have no dropout before their adapters, as in peft; "
            "set it to 0, or remove the experts from `targets`"
        )
    if adapters.dropout and tp > 1:
        yield f"{key}: found {adapters.dropout:g} with tp {tp}, whose ranks would draw other numbers; set it to 0"


def _differing_problems(
    model: OmniModel, planned: Mapping[str, Adapters], present: Mapping[str, Adapters], plan: ParallelPlan
) -> Iterator[str]:
    """Adapters that are there stay; components of one HF model share a file, with one ``rslora`` and ``dropout``."""
    for name in planned.keys() & present.keys():
        if planned[name] != present[name]:
            yield (
                f"{plan.path_of(name, 'lora')}.lora: {name} already has other adapters ({present[name].summary}) than "
                f"the plan asks for ({planned[name].summary}); use the same, or a model without adapters"
            )
    adapters, first = {**present, **planned}, dict[str, str]()
    for name, each in adapters.items():
        other = adapters[first.setdefault(root_of(model, name), name)]
        if (each.rslora, each.dropout) != (other.rslora, other.dropout):
            yield (
                f"{plan.path_of(name, 'lora')}.lora: found {each.summary}, but {other.summary} in another component of "
                "the same HF model; peft has one `rslora` and one `dropout` for both: use the same"
            )
