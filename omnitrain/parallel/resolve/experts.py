"""How the experts of one component are spread and computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import AUTO
from omnitrain.ops.experts.routers import find_router
from omnitrain.parallel.expert.apply import ExpertLayer
from omnitrain.parallel.expert.deepep import deepep_problem
from omnitrain.parallel.resolve.sources import Asked
from omnitrain.recipe.parallel import FOUNDATION, Chunks, ComponentPlan, ParallelPlan

# Fields that a component without experts ignores where they come from the default plan.
_OF_EXPERTS = {
    "expert_rows": "has experts",
    "offloaded_tensors": "has experts and keeps them",
    "recomputed_parts": "has such parts",
    "expert_chunks": "has experts that are spread (ep 1)",
    "delay_wgrad": "has experts that are spread (ep 1)",
    "expert_dispatcher": "has experts that are spread (ep 1)",
}


def expert_fields(asked: Asked, degrees: tuple[str, int, int] | None, compute: str | None) -> dict[str, Any]:
    """Fields of the complete plan.

    Args:
        asked: of the component.
        degrees: its mode, copies, ranks of a copy; None: they do not fit.
        compute: dtype in which it computes.
    """
    ep = _ep(asked, degrees)
    chunks, delay_wgrad = _overlap_of_experts(asked, ep)
    return {
        "ep": ep,
        "expert_rows": _expert_rows(asked),
        "expert_chunks": chunks,
        "delay_wgrad": delay_wgrad,
        "expert_dispatcher": _expert_dispatcher(asked, ep, compute),
    }


def router_problems(
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


def unused_problems(plan: ParallelPlan, plans: Mapping[str, ComponentPlan]) -> Iterator[str]:
    """A default that no component takes does nothing."""
    for field, what in _OF_EXPERTS.items():
        found = getattr(plan.default, field)
        if _asks(found) and not any(getattr(own, field) for own in plans.values()):
            yield f"default.{field}: found {found}, but no component {what}; remove it"


def _asks(found: object) -> bool:
    """Whether a field asks for anything; 1 is a degree that asks for nothing, and equal to True, which does."""
    return found is True or bool(found and found != 1)


def _ep(asked: Asked, degrees: tuple[str, int, int] | None) -> int:
    """Ranks over which the component's experts are spread: those of the state, or 1."""
    there = asked.state.size("ep")
    wanted = asked.merged.ep or there
    if not asked.expert_layers:
        if (asked.own.ep or 1) > 1 and asked.name != FOUNDATION:
            asked.problem("ep", f"found {wanted}, but the component has no experts; use 1, or remove it")
        return 1
    if wanted == 1:
        return 1
    if wanted != there:
        if asked.name == FOUNDATION:  # told with its other degrees
            return 1
        allowed = " or ".join(map(str, sorted({1, there})))
        asked.problem("ep", f"found {wanted}, but the parallel state has {there}; use {allowed}")
        return 1
    if degrees is not None and degrees[1:] != (asked.state.shape.dp_replicate, asked.state.size("fsdp")):
        asked.problem(
            "dp_replicate",
            f"found {degrees[1]} x {degrees[2]} (dp_replicate x dp_shard) with ep {wanted}; experts that are "
            "spread lie as the parallel state says: remove it, or use ep: 1",
        )
    for layer in asked.expert_layers:
        if layer.num_experts % wanted:
            fitting = [n for n in range(1, layer.num_experts + 1) if layer.num_experts % n == 0]
            asked.problem(
                "ep",
                f"found {wanted}, which does not divide the {layer.num_experts} experts of {layer.name}; "
                f"{', '.join(map(str, fitting))} would",
            )
            break
    return wanted


def _expert_rows(asked: Asked) -> int | None:
    if asked.own.expert_rows and not asked.expert_layers:
        asked.problem("expert_rows", f"found {asked.own.expert_rows}, but the component has no experts; remove it")
    if not asked.expert_layers or asked.merged.expert_rows is None:
        return None
    require_own_products(asked, "expert_rows", asked.merged.expert_rows)
    return asked.merged.expert_rows


def require_own_products(asked: Asked, field: str, found: object) -> None:
    """What no products but ours can do."""
    for backend in sorted({layer.backend for layer in asked.expert_layers} - {AUTO, "torch"}):
        asked.problem(
            field,
            f"found {found}, but experts backend {backend} computes all rows at once and keeps what it keeps; use "
            "the backend auto or torch, or remove it",
        )


def _overlap_of_experts(asked: Asked, ep: int) -> tuple[Chunks, bool | None]:
    """Chunks of a rank's experts, and whether their weights' gradients are delayed."""
    for field in ("expert_chunks", "delay_wgrad"):
        if _asks(getattr(asked.own, field)) and ep == 1:
            asked.problem(field, f"found {getattr(asked.own, field)} with ep 1, where no row travels; remove it")
    if ep == 1:
        return None, None
    chunks = asked.merged.expert_chunks or 1
    fewest = min(layer.num_experts for layer in asked.expert_layers) // ep
    if not isinstance(chunks, str) and chunks > max(fewest, 1):
        asked.problem("expert_chunks", f"found {chunks}, but a rank has {fewest} experts of a layer; use 1 to {fewest}")
    if asked.merged.delay_wgrad:
        require_own_products(asked, "delay_wgrad", "true")
    return chunks, bool(asked.merged.delay_wgrad)


def _expert_dispatcher(asked: Asked, ep: int, compute: str | None) -> Literal["torch", "deepep", "auto"] | None:
    """What moves rows of experts; ``auto`` is left to a trial where DeepEP may work."""
    wanted = asked.merged.expert_dispatcher
    if ep == 1:
        if asked.own.expert_dispatcher is not None:
            asked.problem("expert_dispatcher", f"found {wanted} with ep 1, where no row travels; remove it")
        return None
    if wanted in (None, "torch"):
        return "torch"
    problem = deepep_problem(asked.state.device_type, compute)
    if not problem and asked.merged.expert_chunks not in (None, 1):
        problem = f"DeepEP sends all rows at once, and expert_chunks is {asked.merged.expert_chunks}"
    if problem and wanted == "deepep":
        asked.problem("expert_dispatcher", f"found deepep, but {problem}; use torch, or auto to fall back on it")
    return "torch" if problem else wanted
