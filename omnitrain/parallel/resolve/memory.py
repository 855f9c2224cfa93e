"""Fill in the plan's fields on memory: recompute, offload and compile."""

from __future__ import annotations

from typing import Any

from omnitrain.parallel.memory.recompute import SAVED_OPS, find_op
from omnitrain.parallel.resolve.experts import require_torch_backend
from omnitrain.parallel.resolve.sources import Request
from omnitrain.recipe.parallel import RecomputedPart


def memory_fields(request: Request, mode: str | None) -> dict[str, Any]:
    """Return these fields of the complete plan; ``mode``: data-parallel mode, None if it does not fit the ranks."""
    merged, has_experts = request.merged, bool(request.expert_layers)
    offload = _only_blocks(request, "activation_offload", bool(merged.activation_offload))
    is_compiled = bool(merged.compile) and request.is_foundation
    if is_compiled and offload:
        request.problem("compile", "compiled blocks cannot offload activations yet; remove one of the two")
    recompute = _recompute(request)
    if request.explicit.offloaded_tensors and not has_experts:
        names = ", ".join(request.explicit.offloaded_tensors)
        request.problem("offloaded_tensors", f"found {names}, but the component has no experts; remove it")
    if request.planned.parameter_offload and mode == "replicate":
        request.problem(
            "parameter_offload", "found true, but the component is replicated, and only shards can be offloaded"
        )
    return {
        **recompute,
        "offloaded_tensors": merged.offloaded_tensors if has_experts else None,
        "activation_offload": offload,
        "parameter_offload": bool(merged.parameter_offload) and mode != "replicate",
        "optimizer_offload": bool(merged.optimizer_offload) and not request.is_frozen,
        "compile": _only_blocks(request, "compile", is_compiled),
    }


def _recompute(request: Request) -> dict[str, Any]:
    """The fields on recompute."""
    merged, flag = request.merged, "enable_gradient_checkpointing is True"
    if request.flags.recompute and request.planned.recompute is None:
        if merged.compile and request.is_foundation:
            request.problem("compile", f"found true, but {flag}; set only one of the two")
        if merged.offloaded_tensors and request.expert_layers:
            text = f"set, but {flag}, which recomputes these tensors; use `recompute: parts`"
            request.problem("offloaded_tensors", text)
    wanted = merged.recompute or "none"
    if wanted == "none" or not _only_blocks(request, "recompute", True):
        return {"recompute": "none"}
    if wanted == "selective":
        return {"recompute": wanted, "saved_ops": _saved_ops(request)}
    if wanted == "parts":
        parts = _recomputed_parts(request)
        return {"recompute": wanted, "recomputed_parts": parts} if parts else {"recompute": "none"}
    return {"recompute": wanted}


def _saved_ops(request: Request) -> list[str]:
    if request.merged.saved_ops is None:
        return [op for op in SAVED_OPS if find_op(op) is not None]
    for op in request.merged.saved_ops:
        if find_op(op) is None:
            request.problem("saved_ops", f"torch has no op {op!r}; expected one such as {', '.join(SAVED_OPS[:3])}")
    return request.merged.saved_ops


def _recomputed_parts(request: Request) -> list[RecomputedPart]:
    of_experts: list[RecomputedPart] = ["router", "expert_activation"] if request.expert_layers else []
    possible: list[RecomputedPart] = ["attention", *of_experts]
    wanted = request.merged.recomputed_parts if request.merged.recomputed_parts is not None else possible
    for part in request.explicit.recomputed_parts or ():
        if part not in possible:
            request.problem("recomputed_parts", f"found {part}, but the component has no experts; remove it")
    if "expert_activation" in wanted:
        require_torch_backend(request, "recomputed_parts", "expert_activation")
    return [part for part in wanted if part in possible]


def _only_blocks(request: Request, field: str, wanted: bool) -> bool:
    """``wanted`` if the component has blocks; setting it explicitly for a component without blocks is a problem."""
    if wanted and not request.has_blocks and getattr(request.explicit, field):
        request.problem(field, "the component has no blocks that transformers can recompute; remove it")
    return wanted and request.has_blocks
