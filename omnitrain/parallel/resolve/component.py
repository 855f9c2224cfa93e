"""Fill in the complete plan of one component."""

from __future__ import annotations

from typing import Any

from omnitrain.errors import UserError
from omnitrain.parallel.memory.recompute import SAVED_OPS, find_op
from omnitrain.parallel.resolve.experts import expert_fields, require_torch_backend
from omnitrain.parallel.resolve.roles import media_keys, refused
from omnitrain.parallel.resolve.sources import STATE_AXIS, Request
from omnitrain.plan.mesh import fit_mesh
from omnitrain.recipe.parallel import ComponentPlan, plan_of, value_of
from omnitrain.recipe.plan_groups import Offloaded, Precision, Recompute, RecomputedPart


def memory_fields(request: Request, mode: str | None) -> dict[str, Any]:
    """Return these fields of the complete plan; ``mode``: data-parallel mode, None if it does not fit the ranks."""
    is_compiled = bool(request.merged.compile) and request.is_foundation
    return {
        "memory.recompute": _recompute(request),
        "memory.offload": _offload(request, mode, is_compiled=is_compiled),
        "compile": is_compiled and _has_blocks(request, "compile", bool(request.explicit.compile)),
    }


def _offload(request: Request, mode: str | None, *, is_compiled: bool) -> list[Offloaded]:
    memory, explicit = request.merged.memory, request.explicit.memory
    is_explicit = explicit.offloads("activations")
    activations = memory.offloads("activations") and _has_blocks(request, "memory.offload", is_explicit)
    if activations and is_compiled and not memory.recomputes_blocks:
        why = "compiled blocks cannot offload activations without recompute yet; add `memory.recompute: full`"
        request.problem("compile", f"{why}, or remove one of the two")
    if (tensors := explicit.offloaded_tensors) and not request.expert_layers:
        request.problem("memory.offload", f"found {', '.join(tensors)}, but the component has no experts; remove it")
    if request.planned.memory.offloads("parameters") and mode == "replicate":
        why = "the component is replicated, and only shards can be offloaded"
        request.problem("memory.offload", f"found parameters, but {why}")
    possible: dict[Offloaded, bool] = {
        "activations": activations,
        **dict.fromkeys(memory.offloaded_tensors, bool(request.expert_layers)),
        "parameters": mode != "replicate",
        "optimizer": not request.is_frozen,
    }
    return [what for what, is_possible in possible.items() if is_possible and memory.offloads(what)]


def _recompute(request: Request) -> str | Recompute:
    merged, flag = request.merged, "enable_gradient_checkpointing is True"
    mode = merged.memory.mode
    is_asked = request.flags.recompute and request.planned.memory.recompute is None
    if is_asked and merged.memory.offloaded_tensors and request.expert_layers:
        text = f"set, but {flag}, which recomputes these tensors; use `memory.recompute: parts`"
        request.problem("memory.offload", text)
    if mode == "none" or not _has_blocks(request, "memory.recompute", request.explicit.memory.recompute is not None):
        return "none"
    if mode == "selective":
        return Recompute(keep=_kept_ops(request))
    if mode == "parts":
        parts = _recomputed_parts(request)
        return Recompute(parts=parts) if parts else "none"
    return mode


def _kept_ops(request: Request) -> list[str]:
    wanted = request.merged.memory.kept_ops
    if wanted is None:
        return [op for op in SAVED_OPS if find_op(op) is not None]
    for op in wanted:
        if find_op(op) is None:
            expected = f"expected one such as {', '.join(SAVED_OPS[:3])}"
            request.problem("memory.recompute", f"torch has no op {op!r}; {expected}")
    return wanted


def _recomputed_parts(request: Request) -> list[RecomputedPart]:
    of_experts: list[RecomputedPart] = ["router", "expert_activation"] if request.expert_layers else []
    possible: list[RecomputedPart] = ["attention", *of_experts]
    wanted = request.merged.memory.recomputed_parts
    wanted = possible if wanted is None else wanted
    for part in request.explicit.memory.recomputed_parts or ():
        if part not in possible:
            request.problem("memory.recompute", f"found {part}, but the component has no experts; remove it")
    if "expert_activation" in wanted:
        require_torch_backend(request, "memory.recompute", "expert_activation")
    return [part for part in wanted if part in possible]


def _has_blocks(request: Request, field: str, is_explicit: bool) -> bool:
    """Whether the component has blocks; a problem if its own plan sets a field that needs them."""
    if is_explicit and not request.has_blocks:
        request.problem(field, "the component has no blocks that transformers can recompute; remove it")
    return request.has_blocks


_DEGREES = ("mode", "dp_replicate", "dp_shard")
_OF_WINDOWS = ("encode.features_on", "encode.feature_bytes")
_MODEL_AXES = ("pp", "cp", "ulysses")  # axes of the foundation; other components have degree 1 by default


def component_plan(request: Request) -> ComponentPlan | None:
    """Return the plan with all fields set; None if ``request`` has problems.

    ``precision.param`` stays None where parameters keep their dtypes.
    """
    for field, text in refused(request.roles, request.explicit):
        request.problem(field, text)
    degrees = _degrees(request)
    precision = _precision(request)
    axes = {axis: request.state.size(STATE_AXIS.get(axis, axis)) for axis in _MODEL_AXES}
    if not request.is_foundation:
        axes = dict.fromkeys(axes, 1) | {"ulysses": request.explicit.ulysses or 1}
    fields = {
        **axes,
        **expert_fields(request, degrees, precision.compute),
        **memory_fields(request, degrees[0] if degrees else None),
        "async_ulysses": _of_foundation(request, "async_ulysses", "sp", "ulysses"),
        "sequence_parallel": _of_foundation(request, "sequence_parallel", "tp", "tp"),
        **_media_fields(request),
    }
    if degrees is None or request.problems:
        return None
    return plan_of(
        {
            **dict(zip(_DEGREES, degrees, strict=True)),
            "tp": request.tp,
            "precision": precision,
            "freeze": request.is_frozen,
            "lora": request.merged.lora if request.has_adapters else None,
            "schedule": request.merged.schedule if request.is_foundation else None,
            **fields,
        }
    )


def _media_fields(request: Request) -> dict[str, Any]:
    """Where and when the component's media are encoded; ``encode.window`` is None where forwards do it."""
    merged, roles = request.merged, request.roles
    if request.is_foundation:
        return _fields_of_foundation(request)
    fields = {key: value_of(merged, key) for key in media_keys(roles)}
    if "a component of a section" in roles:
        window = request.plans.sections[request.plans.section_of(request.name)].micro_batch
        return {**fields, "place": "world", "encode.window": window}
    place = merged.place or _place_by_default(request)
    if "a projector" in roles:  # the forward of a micro-batch projects what it has received
        return {**fields, "place": "local" if place == "local" else "group"}
    return {**fields, **({"place": place} if "a decoder" in roles else _fields_of_encoder(request, place))}


def _place_by_default(request: Request) -> str:
    return "group" if request.state.size("data") > 1 else "local"


def _fields_of_encoder(request: Request, place: str) -> dict[str, Any]:
    window, explicit = _window(request, place), request.explicit
    for field in _OF_WINDOWS:
        if (found := value_of(explicit, field)) is not None and window is None:
            request.problem(field, f"found {found} without `encode.window`: no features wait; set it, or remove it")
    if explicit.quadratic_cost is not None and place == "local":
        request.problem(
            "quadratic_cost",
            f"found {explicit.quadratic_cost} with `place: local`, which divides no items; set `place: world`, or "
            "remove it",
        )
    unused = dict.fromkeys(_OF_WINDOWS) if window is None else {}
    return {"place": place, "encode.window": window, **unused}


def _window(request: Request, place: str) -> int | str | None:
    """The micro-batches whose items an encoder of ``main`` encodes together; None: each forward encodes its own."""
    window, state = request.merged.encode.window, request.state
    stages = state.size("pp")
    if place == "world":
        return window or "step" if stages > 1 else None if window == 1 else window
    # Ranks that hold a sample may have calls of their own.
    together = ("sequence",) * ((request.explicit.ulysses or 1) > 1) + ("tp",) * (request.tp > 1)
    divides_items = place == "group" and state.size("data") > state.size(*together)
    if stages == 1 and (window in (None, 1) or divides_items):
        return None if window == 1 else window
    if request.explicit.encode.window is None:
        return None
    why = ", which divides no items here; set `place: world`"
    if stages > 1:
        why = f" and pp {stages}, where the forwards of the first stage encode; set `place: world`, or remove it"
    request.problem("encode.window", f"found {window} with `place: {place}`{why}")
    return window  # no field of windows is without one


def _fields_of_foundation(request: Request) -> dict[str, Any]:
    """Whether packs are dealt to ranks by cost; the default plan's ``place`` and ``quadratic_cost`` are for media."""
    explicit = request.explicit
    if explicit.place == "world" and request.plans.sections:
        request.problem("place", "found world with `sections`, which already deal micro-batches to ranks; remove it")
    if explicit.quadratic_cost is not None and explicit.place != "world":
        request.problem(
            "quadratic_cost",
            f"found {explicit.quadratic_cost} without `place: world`, so ranks run what they drew; set it, or remove "
            "`quadratic_cost`",
        )
    return {"place": explicit.place or _place_by_default(request), "quadratic_cost": explicit.quadratic_cost}


def _degrees(request: Request) -> tuple[str, int, int] | None:
    """Mode, copies, ranks that share one copy; None: they do not fit the ranks.

    The degrees of the foundation and of the default plan multiply to the data-parallel ranks; the ranks that share a
    sequence share a copy, too. The explicit degrees of another component multiply to all ranks of the loss group.
    """
    mode, replicate, shard = (getattr(request.merged, field) for field in _DEGREES)
    state, of_all = request.state.shape, ("replicate", request.state.size("loss"), 1)
    if not any((mode, replicate, shard)):
        of_state = (state.dp_replicate, request.state.size("fsdp"))
        return of_all if request.state.dp_mode == "replicate" else (_mode_of(*of_state), *of_state)
    path = request.plans.path_of(request.name, *_DEGREES)
    is_data = request.is_foundation or path == "default"
    ranks = request.state.size("dp" if is_data else "loss")
    if mode == "hsdp" and not (replicate or shard):
        request.problems.append(f"{path}.mode: hsdp needs dp_replicate or dp_shard; they multiply to {ranks} ranks")
        return None
    try:
        of_mode = {"fsdp2": (1, shard), "replicate": (replicate, 1)}
        copies, shards = of_mode.get(mode, (replicate, shard))
        shape = fit_mesh(ranks, dp_replicate=copies, dp_shard=shards)
    except UserError as error:
        request.problems.append(f"{path}: {' '.join(str(error).split())}")
        return None
    degrees = (shape.dp_replicate, shape.dp_shard)
    if request.is_foundation and degrees != (state.dp_replicate, state.dp_shard):
        request.problems.append(
            f"{path}: found {degrees[0]} x {degrees[1]} (dp_replicate x dp_shard), but the parallel state has "
            f"{state.dp_replicate} x {state.dp_shard}; set the degrees in one of the two"
        )
        return None
    if is_data:
        degrees = (degrees[0], degrees[1] * request.state.size("sequence"))
    return of_all if mode == "replicate" else (mode or _mode_of(*degrees), *degrees)


def _precision(request: Request) -> Precision:
    merged = request.merged.precision
    param = merged.param or (None if request.is_frozen or request.has_adapters else "float32")
    if request.flags.mixed_precision is False and merged.compute not in (None, merged.param or "float32"):
        request.problem(
            "precision",
            f"found compute {merged.compute}, but enable_mixed_precision is False (`train.precision: fp32` in a "
            "recipe); use one of the two",
        )
    explicit = request.explicit.precision
    if explicit.reduce is not None and request.is_frozen:
        request.problem(
            "precision.reduce", f"found {explicit.reduce}, but a frozen component has no gradients; remove it"
        )
    low = "bfloat16" if request.flags.mixed_precision else param
    return Precision(param=param, compute=merged.compute or low, reduce=merged.reduce or "float32")


def _of_foundation(request: Request, field: str, axis: str, key: str) -> bool:
    """A switch that only the foundation supports, and only with a degree of ``axis`` above 1."""
    wanted = bool(getattr(request.merged, field)) and request.is_foundation
    if wanted and request.state.size(axis) == 1:
        request.problem(field, f"found true with {key} 1, where it does nothing; set {key} above 1, or remove it")
    return wanted


def _mode_of(dp_replicate: int, dp_shard: int) -> str:
    if dp_replicate == 1:
        return "fsdp2"
    return "replicate" if dp_shard == 1 else "hsdp"
