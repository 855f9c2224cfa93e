"""What of one component is computed again, waits in host memory, or is compiled."""

from __future__ import annotations

from typing import Any

from omnitrain.parallel.memory.recompute import SAVED_OPS, find_op
from omnitrain.parallel.resolve.experts import require_own_products
from omnitrain.parallel.resolve.sources import Asked
from omnitrain.recipe.parallel import FOUNDATION, OffloadedTensor, RecomputedPart


def memory_fields(asked: Asked, mode: str | None) -> dict[str, Any]:
    """Fields of the complete plan; ``mode``: of its data parallelism, None where that does not fit."""
    offload = _only_blocks(asked, "activation_offload", bool(asked.merged.activation_offload))
    return {
        **_recompute(asked),
        "offloaded_tensors": _offloaded_tensors(asked),
        "activation_offload": offload,
        "parameter_offload": _parameter_offload(asked, mode),
        "optimizer_offload": bool(asked.merged.optimizer_offload) and not asked.is_frozen,
        "compile": _compile(asked, offload),
    }


def _recompute(asked: Asked) -> dict[str, Any]:
    """What is computed again, by field."""
    found = asked.merged.recompute
    if asked.flags.recompute and found == "none":
        asked.problem("recompute", "found none, but enable_gradient_checkpointing is True; set it in one place")
    if asked.flags.recompute and found is None:
        _require_no_other_use_of_blocks(asked)
    wanted = found or ("full" if asked.flags.recompute else "none")
    if wanted == "none" or not _only_blocks(asked, "recompute", True):
        return {"recompute": "none"}
    if wanted == "selective":
        return {"recompute": wanted, "saved_ops": _saved_ops(asked)}
    if wanted == "parts":
        parts = _recomputed_parts(asked)
        return {"recompute": wanted, "recomputed_parts": parts} if parts else {"recompute": "none"}
    return {"recompute": wanted}


def _require_no_other_use_of_blocks(asked: Asked) -> None:
    """Of what the call wants recomputed, where the plan does not say it."""
    if asked.merged.compile and asked.is_foundation:
        asked.problem("compile", "found true, but enable_gradient_checkpointing is True; use one")
    if asked.merged.offloaded_tensors and asked.expert_layers:
        asked.problem(
            "offloaded_tensors",
            "set, but enable_gradient_checkpointing is True, which does not keep them; use `recompute: parts`",
        )


def _saved_ops(asked: Asked) -> list[str]:
    if asked.merged.saved_ops is None:
        return [op for op in SAVED_OPS if find_op(op) is not None]
    for op in asked.merged.saved_ops:
        if find_op(op) is None:
            asked.problem("saved_ops", f"torch has no op {op!r}; expected one such as {', '.join(SAVED_OPS[:3])}")
    return asked.merged.saved_ops


def _recomputed_parts(asked: Asked) -> list[RecomputedPart]:
    possible: list[RecomputedPart] = ["attention", "router", "expert_activation"]
    if not asked.expert_layers:
        possible = ["attention"]
    wanted = asked.merged.recomputed_parts if asked.merged.recomputed_parts is not None else possible
    for part in asked.own.recomputed_parts or ():
        if part not in possible:
            asked.problem("recomputed_parts", f"found {part}, but the component has no experts; remove it")
    if "expert_activation" in wanted:
        require_own_products(asked, "recomputed_parts", "expert_activation")
    return [part for part in wanted if part in possible]


def _offloaded_tensors(asked: Asked) -> list[OffloadedTensor] | None:
    if asked.own.offloaded_tensors and not asked.expert_layers:
        found = ", ".join(asked.own.offloaded_tensors)
        asked.problem("offloaded_tensors", f"found {found}, but the component has no experts; remove it")
    return asked.merged.offloaded_tensors if asked.expert_layers else None


def _only_blocks(asked: Asked, field: str, wanted: bool) -> bool:
    """``wanted``, as far as the component has blocks; to ask one without blocks for it by name is a mistake."""
    if wanted and not asked.has_blocks and getattr(asked.own, field):
        asked.problem(field, "the component has no blocks that transformers could recompute; remove it")
    return wanted and asked.has_blocks


def _parameter_offload(asked: Asked, mode: str | None) -> bool:
    found = asked.merged.parameter_offload
    if asked.flags.parameter_offload and found is False:
        asked.problem("parameter_offload", "found false, but enable_fsdp_offload is True; set it in one place")
    if found and mode == "replicate":
        asked.problem("parameter_offload", "found true, but the component is replicated; only shards can be")
    return bool(found or (found is None and asked.flags.parameter_offload)) and mode != "replicate"


def _compile(asked: Asked, offload: bool) -> bool:
    if asked.own.compile and asked.name != FOUNDATION:
        asked.problem("compile", f"only the foundation can be compiled; set it on {FOUNDATION}")
    wanted = bool(asked.merged.compile) and asked.name == FOUNDATION
    if wanted and offload:
        asked.problem("compile", "compiled blocks cannot offload activations yet; remove one of the two")
    return _only_blocks(asked, "compile", wanted)
