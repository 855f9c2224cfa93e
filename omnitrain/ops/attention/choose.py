"""Choose the backend of a call."""

from __future__ import annotations

from typing import Any

import torch

from omnitrain.errors import UserError
from omnitrain.ops.attention.backends import BACKENDS
from omnitrain.ops.attention.spec import AttentionBackend, AttentionCall, MaskSpec

AUTO = "auto"


# Class of a layer, backend that the settings ask for, needs, device and dtype of its calls, and more -> its backend.
CHOSEN: dict[tuple[Any, ...], AttentionBackend] = {}


def choose(module: torch.nn.Module, call: AttentionCall, asked: str) -> AttentionBackend:
    """Return the backend ``asked``, for ``auto`` the first that can run the call; a UserError names the obstacle."""
    query, name = call.query, type(module).__name__
    sizes, of_mask = (query.size(-1), call.value.size(-1)), getattr(call.mask.general, "dtype", None)
    key = (name, asked, call.needs, query.device.type, query.dtype, *sizes, of_mask, call.has_gradients)
    if key not in CHOSEN:
        CHOSEN[key] = _choose(name, call, asked)
    return CHOSEN[key]


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, and ``auto``."""
    return (AUTO, *(backend.name for backend in BACKENDS))


def require_trainable(asked: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError for a backend that cannot train causal attention in ``dtype`` on ``device`` with any model."""
    if asked != AUTO:
        states = torch.empty(1, 1, 2, 64, device=device, dtype=dtype, requires_grad=True)
        with torch.enable_grad():
            _choose("ordinary attention", AttentionCall(states, states, states, MaskSpec((0, 2), causal=True)), asked)


def _choose(module: str, call: AttentionCall, asked: str) -> AttentionBackend:
    device = call.query.device.type
    candidates = [b for b in BACKENDS if b.automatic_on is None or device in b.automatic_on]
    for backend in candidates if asked == AUTO else [b for b in BACKENDS if b.name == asked]:
        if _problem(backend, call) is None:
            return backend
    problems = {backend.name: _problem(backend, call) for backend in BACKENDS}
    if asked == AUTO:
        reasons = "; ".join(f"{backend.name}: {problems[backend.name]}" for backend in candidates)
        raise UserError(f"no attention backend can compute {module}: {reasons}")
    able = ", ".join(name for name, problem in problems.items() if problem is None) or "none"
    raise UserError(f"attention backend {asked!r} cannot compute {module}: {problems[asked]}; {able} can")


def _problem(backend: AttentionBackend, call: AttentionCall) -> str | None:
    lacking = sorted(call.needs - backend.honours)
    return f"it does not support {', '.join(lacking)}" if lacking else backend.obstacle(call)
