"""Fill in the plan's fields on memory: recompute, offload and compile."""

from __future__ import annotations

from typing import Any

from omnitrain.parallel.memory.recompute import SAVED_OPS, find_op
from omnitrain.parallel.resolve.experts import require_torch_backend
from omnitrain.parallel.resolve.sources import Request
from omnitrain.recipe.plan_groups import Offloaded, Recompute, RecomputedPart


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
    if activations and is_compiled:
        request.problem("compile", "compiled blocks cannot offload activations yet; remove one of the two")
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
    if request.flags.recompute and request.planned.memory.recompute is None:
        if merged.compile and request.is_foundation:
            request.problem("compile", f"found true, but {flag}; set only one of the two")
        if merged.memory.offloaded_tensors and request.expert_layers:
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
