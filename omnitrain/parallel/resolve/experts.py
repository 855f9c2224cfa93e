"""Fill in the plan's fields on experts: sharding, chunks and dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.entry import AUTO
from omnitrain.ops.experts.routers import find_router
from omnitrain.parallel.expert.apply import ExpertLayer
from omnitrain.parallel.expert.deepep import deepep_problem
from omnitrain.parallel.resolve.sources import Request
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan, value_of
from omnitrain.recipe.plan_groups import Chunks

# Value of the default plan that a component without experts ignores -> its key, and the components that use it.
_USERS_OF_EXPERT_FIELDS = {
    "experts.rows": ("experts.rows", "has experts"),
    "memory.offloaded_tensors": ("memory.offload", "has experts and keeps these tensors"),
    "memory.recomputed_parts": ("memory.recompute", "has such parts"),
    "experts.chunks": ("experts.chunks", "has expert parallelism (ep 1)"),
    "experts.delay_wgrad": ("experts.delay_wgrad", "has expert parallelism (ep 1)"),
    "experts.dispatcher": ("experts.dispatcher", "has expert parallelism (ep 1)"),
}


def expert_fields(request: Request, degrees: tuple[str, int, int] | None, compute: str | None) -> dict[str, Any]:
    """Return these fields of the complete plan; ``degrees`` None: they do not fit the ranks."""
    ep = _ep(request, degrees)
    chunks, delay_wgrad = _overlap_of_experts(request, ep)
    return {
        "ep": ep,
        "experts.rows": _expert_rows(request),
        "experts.chunks": chunks,
        "experts.delay_wgrad": delay_wgrad,
        "experts.dispatcher": _expert_dispatcher(request, ep, compute),
    }


def router_problems(
    model: OmniModel, plan: ParallelPlan, component: str, layers: Sequence[ExpertLayer], resolved: ComponentPlan
) -> Iterator[str]:
    """Yield a problem if the plan recomputes routers, and the model does not declare them to transformers."""
    for layer in layers if "router" in (resolved.memory.recomputed_parts or ()) else ():
        if find_router(model, layer.name.rpartition(".")[0]) is None:
            yield (
                f"{plan.path_of(component, 'memory.recompute')}.memory.recompute: found router, but "
                f"{type(model.foundation).__name__} declares no router of {layer.name} to transformers; list only "
                "the other parts"
            )
            return


def unused_problems(plan: ParallelPlan, plans: Mapping[str, ComponentPlan]) -> Iterator[str]:
    """Yield the fields of the default plan that no component uses."""
    for field, (key, user) in _USERS_OF_EXPERT_FIELDS.items():
        value = value_of(plan.default, field)
        if _has_effect(value) and not any(value_of(component, field) for component in plans.values()):
            yield f"default.{key}: found {value}, but no component {user}; remove it"


def _has_effect(value: object) -> bool:
    """Whether a field's value does something: True does, a degree of 1 does not, although True == 1."""
    return value is True or bool(value and value != 1)


def _ep(request: Request, degrees: tuple[str, int, int] | None) -> int:
    """The component's degree of expert parallelism: that of the state, or 1."""
    of_state = request.state.size("ep")
    wanted = request.merged.ep or of_state
    if not request.expert_layers:
        if (request.explicit.ep or 1) > 1 and not request.is_foundation:
            request.problem("ep", f"found {wanted}, but the component has no experts; use 1, or remove it")
        return 1
    if wanted == 1:
        return 1
    if wanted != of_state:
        if not request.is_foundation:  # else reported with its other degrees
            allowed = " or ".join(map(str, sorted({1, of_state})))
            request.problem("ep", f"found {wanted}, but the parallel state has {of_state}; use {allowed}")
        return 1
    if degrees is not None and degrees[1:] != (request.state.shape.dp_replicate, request.state.size("fsdp")):
        request.problem(
            "dp_replicate",
            f"found {degrees[1]} x {degrees[2]} (dp_replicate x dp_shard) with ep {wanted}, but expert parallelism "
            "needs the degrees of the parallel state; remove it, or use ep: 1",
        )
    uneven = next((layer for layer in request.expert_layers if layer.num_experts % wanted), None)
    if uneven is not None:
        number = uneven.num_experts
        fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
        text = f"found {wanted}, which does not divide the {number} experts of {uneven.name}; {fitting} would"
        request.problem("ep", text)
    return wanted


def _expert_rows(request: Request) -> int | None:
    rows = request.explicit.experts.rows
    if not request.expert_layers:
        if rows:
            request.problem("experts.rows", f"found {rows}, but the component has no experts; remove it")
        return None
    if request.merged.experts.rows is not None:
        require_torch_backend(request, "experts.rows", request.merged.experts.rows)
    return request.merged.experts.rows


def require_torch_backend(request: Request, field: str, value: object) -> None:
    """Note a problem for every experts backend that does not support ``field``; only ``torch`` does."""
    for backend in sorted({layer.backend for layer in request.expert_layers} - {AUTO, "torch"}):
        why = f"experts backend {backend} does not support it; use the backend auto or torch, or remove it"
        request.problem(field, f"found {value}, but {why}")


def _overlap_of_experts(request: Request, ep: int) -> tuple[Chunks, bool | None]:
    """The number of chunks of a rank's experts, and whether their weight gradients are delayed."""
    for field in ("experts.chunks", "experts.delay_wgrad"):
        if _has_effect(value := value_of(request.explicit, field)) and ep == 1:
            request.problem(field, f"found {value} with ep 1, where it does nothing; remove it")
    if ep == 1:
        return None, None
    chunks = request.merged.experts.chunks or 1
    fewest = min(layer.num_experts for layer in request.expert_layers) // ep
    if not isinstance(chunks, str) and chunks > max(fewest, 1):
        request.problem(
            "experts.chunks", f"found {chunks}, but a rank has {fewest} experts of a layer; use 1 to {fewest}"
        )
    if request.merged.experts.delay_wgrad:
        require_torch_backend(request, "experts.delay_wgrad", "true")
    return chunks, bool(request.merged.experts.delay_wgrad)


def _expert_dispatcher(request: Request, ep: int, compute: str | None) -> Literal["torch", "deepep", "auto"] | None:
    """The dispatcher of the experts; it stays ``auto`` where only a trial can tell whether DeepEP works."""
    wanted = request.merged.experts.dispatcher
    if ep == 1:
        if request.explicit.experts.dispatcher is not None:
            request.problem("experts.dispatcher", f"found {wanted} with ep 1, where it does nothing; remove it")
        return None
    if wanted in (None, "torch"):
        return "torch"
    problem = deepep_problem(request.state.device_type, compute)
    if not problem and request.merged.experts.chunks not in (None, 1):
        problem = f"DeepEP cannot dispatch in chunks, and experts.chunks is {request.merged.experts.chunks}"
    if problem and wanted == "deepep":
        request.problem("experts.dispatcher", f"found deepep, but {problem}; use torch, or auto to fall back on it")
    return "torch" if problem else wanted
