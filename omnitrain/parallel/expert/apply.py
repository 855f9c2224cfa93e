"""Expert parallelism: the experts of a layer are spread over ranks, and tokens go to them and back.

    experts     E0 E1 | E2 E3       rank 0 has the first half of every layer's experts, rank 1 the second
    rank 0      tokens that chose E2 or E3 go to rank 1, their results come back
    rank 1      tokens that chose E0 or E1 go to rank 0

Weights are DTensors ``Shard(0)`` on the mesh ``ep``, from before they are sharded by FSDP over ``ep_fsdp`` to the end,
so norms, optimizers and checkpoints need no case of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import backend_of, experts_in, set_experts, settings_of
from omnitrain.ops.experts.weights import names_by_expert, num_experts_of, weight_names
from omnitrain.parallel.expert.deepep import DeepEpDispatcher, open_deepep
from omnitrain.parallel.expert.dispatch import GroupLink, RankDispatcher
from omnitrain.parallel.expert.shared_expert import SharedExpertOverlap, shared_experts
from omnitrain.parallel.expert.tp_dispatch import TPTokenDispatcher
from omnitrain.parallel.fsdp.shard import device_of
from omnitrain.recipe.globs import any_layer, matches
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan

_SPREADS = "ep_dispatch_experts"  # the style in plans of transformers

_UNMEASURED = 4  # chunks, where nobody measures


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        name: of their module.
        weights: names of their parameters that have an expert per entry of dim 0.
        num_experts: of the layer.
        backend: that was named for it, or ``auto``.
    """

    name: str
    weights: tuple[str, ...]
    num_experts: int
    backend: str


def expert_layers(model: OmniModel) -> dict[str, tuple[ExpertLayer, ...]]:
    """Component -> its layers whose experts ask transformers' ``ExpertsInterface``."""
    owner = {path: name for name, parameters in model.components.items() for path in parameters}
    found: dict[str, list[ExpertLayer]] = {name: [] for name in model.components}
    for name, module in experts_in(model):
        weights = tuple(f"{name}.{weight}" for weight in weight_names(module))
        found[owner[weights[0]]].append(ExpertLayer(name, weights, num_experts_of(module), backend_of(module)))
    return {name: tuple(layers) for name, layers in found.items()}


def chosen_layers(
    model: OmniModel, layers: Sequence[ExpertLayer], ep_plan: Mapping[str, int] | None
) -> tuple[ExpertLayer, ...]:
    """Those ``layers`` of a component that ``ep_plan`` names; without one, those that the model's own plan names.

    Where that names none of them, all: most models that have a plan spread exactly what they declare as experts.
    """
    if ep_plan is None:
        own = set(spread_by_transformers(model))
        return tuple(layer for layer in layers if layer.name in own) or tuple(layers)
    return tuple(layer for layer in layers if any(matches(glob, name) for glob in ep_plan for name in layer.weights))


def spread_by_transformers(model: OmniModel) -> list[str]:
    """Names of the modules that the expert parallel plans of the HF models in ``model`` dispatch tokens to."""
    found: dict[str, None] = {}
    for root, part in model.named_modules():
        if part is not model and isinstance(part, PreTrainedModel):
            plan = getattr(part, "ep_plan", None) or {}  # transformers 5.18 has no plan that dispatches
            said = {name for name, style in plan.items() if style == _SPREADS}
            own = (name for name, _ in part.named_modules() if any_layer(name) in said)
            found |= dict.fromkeys(f"{root}.{name}" for name in own)
    return list(found)


def own_plan_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan
) -> Iterator[str]:
    """What the model's own plan spreads, which is taken without globs, but cannot be spread here."""
    known = {layer.name for own in layers.values() for layer in own}
    other = [name for name in spread_by_transformers(model) if name not in known]
    if other and plan.ep_plan is None and known:
        yield (
            f"{plan.path_of(FOUNDATION, 'ep')}.ep: the model's own plan also spreads {other[0]}, which does not ask "
            "transformers' ExpertsInterface; use 1, or name the others in ep_plan"
        )


def ep_plan_problems(layers: Mapping[str, Sequence[ExpertLayer]], ep_plan: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with globs for experts, each of which matches some name of the model."""
    every_layer = [layer for own in layers.values() for layer in own]
    for glob, dim in ep_plan.items():
        if dim != 0:
            yield f"ep_plan: `{glob}` says dimension {dim}; transformers' experts are counted by dimension 0"
        if not any(matches(glob, name) for layer in every_layer for name in layer.weights):
            yield f"ep_plan: `{glob}` names no weights of experts; {_named(every_layer)}"
    for layer in every_layer:
        taken = {name: any(matches(glob, name) for glob in ep_plan) for name in layer.weights}
        if any(taken.values()) and not all(taken.values()):
            left = ", ".join(name for name, is_taken in taken.items() if not is_taken)
            yield f"ep_plan: takes only a part of the weights of {layer.name}; {left} must be with the others"


def _named(layers: Sequence[ExpertLayer]) -> str:
    if not layers:
        return "the model has none"
    return f"expected some such as {', '.join(f'`{name}`' for name in layers[0].weights)}"


def bound_rows(model: OmniModel, layers: Sequence[ExpertLayer], rows: int | None) -> None:
    """Let the experts of ``layers`` compute so many rows at a time."""
    for layer in layers:
        set_experts(model.get_submodule(layer.name), row_budget=rows)


def spread_experts(model: OmniModel, layers: Sequence[ExpertLayer], mesh: DeviceMesh, plan: ComponentPlan) -> str:
    """Keep this rank's part of the experts of ``layers``, and let tokens travel to theirs.

    Args:
        model: its weights equal on all ranks of ``mesh``; changed in place.
        layers: their numbers of experts are multiples of the mesh's size.
        mesh: ``[ep]``.
        plan: of their component.

    Returns:
        What moves their rows: ``torch`` or ``deepep``.

    Raises:
        UserError: DeepEP is asked for, and no exchange goes through it; nothing is changed then.
    """
    buffer = _deepep_buffer([model.get_submodule(layer.name) for layer in layers], mesh, plan)
    # A shard of a shard is put together in two steps, of which torch warns; it is done when weights are saved.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for layer in layers:
        module = model.get_submodule(layer.name)
        for name in names_by_expert(module):
            module._parameters[name] = _own_part(getattr(module, name), mesh)
        by_torch = RankDispatcher(GroupLink(mesh.get_group()), _chunks(plan, layer.num_experts // mesh.size()))
        dispatcher = by_torch if buffer is None else DeepEpDispatcher(buffer)
        set_experts(module, dispatcher=dispatcher, delays_weight_gradients=bool(plan.delay_wgrad))
        if plan.expert_chunks not in (None, 1):
            above = model.get_submodule(layer.name.rpartition(".")[0])
            if (shared := shared_experts(above, module, device_of(mesh))) is not None:
                set_experts(module, overlap_with=SharedExpertOverlap(above, shared).compute)
    return "torch" if buffer is None else "deepep"


def _deepep_buffer(experts: Sequence[nn.Module], mesh: DeviceMesh, plan: ComponentPlan) -> Any:
    """What DeepEP moves the rows of these experts through; None: torch moves them."""
    if plan.expert_dispatcher in (None, "torch"):
        return None
    widths = [module.get_parameter("down_proj").size(2 if module.is_transposed else 1) for module in experts]
    buffer, problem = open_deepep(mesh.get_group(), max(widths), device_of(mesh))
    if problem and plan.expert_dispatcher == "deepep":
        raise UserError(
            f"expert_dispatcher: found deepep, but an exchange by it failed: {problem}; use torch, or auto to fall "
            "back on it"
        )
    return buffer


def share_tokens(model: OmniModel, layers: Sequence[ExpertLayer], tp_mesh: DeviceMesh) -> None:
    """Let each rank of ``tp_mesh``, all of which hold the same tokens, compute the experts of its share of them."""
    for layer in layers if tp_mesh.size() > 1 else ():
        module = model.get_submodule(layer.name)
        set_experts(module, dispatcher=TPTokenDispatcher(settings_of(module).dispatcher, tp_mesh.get_group()))


def _chunks(plan: ComponentPlan, num_experts: int) -> int:
    """Of so many experts on a rank; where it is to be measured, a fixed number until somebody does."""
    if isinstance(plan.expert_chunks, str):
        return min(_UNMEASURED, num_experts)
    return plan.expert_chunks or 1


def _own_part(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """No rank sends another anything: all have the same weights. The rest of them is freed."""
    part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False), requires_grad=weight.requires_grad)
