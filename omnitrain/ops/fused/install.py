"""Replace operations of a model by other implementations.

Modules are recognized by their results, never by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from omnitrain.errors import UserError
from omnitrain.ops.fused.patch_embed import PATCH_EMBED, is_patch_embedding
from omnitrain.ops.fused.rms_norm import RMS_NORM, rms_norm_form
from omnitrain.ops.fused.rotary import ROTARY, rotary_forward
from omnitrain.ops.fused.swiglu import SWIGLU, is_swiglu, swiglu_forward
from omnitrain.ops.patch_forward import Forward, set_forward
from omnitrain.ops.registry import Backend, choose


@dataclass(frozen=True)
class FusedOp:
    """The implementation of one operation in a model."""

    backend: str
    # class name -> number of modules that now use it; empty if ``backend`` is ``torch``, the model's code
    classes: Counter[str] = field(default_factory=Counter)


def _rms_norm_forward(module: nn.Module, run: Callable[..., Any]) -> Forward | None:
    form = rms_norm_form(module)
    name = next((name for name, _ in module.named_parameters()), None)
    return None if form is None else lambda self, x: run(x, None if name is None else getattr(self, name), form)


def _swiglu_forward(module: nn.Module, run: Callable[..., Any]) -> Forward | None:
    return (lambda self, x: swiglu_forward(self, x, run)) if is_swiglu(module) else None


def _patch_forward(module: nn.Module, run: Callable[..., Any]) -> Forward | None:
    return (lambda self, x: run(x, self.weight, self.bias)) if is_patch_embedding(module) else None


# Operation -> its backends, and a function: (module, run) -> the new forward; None: no module of this operation.
_OPERATIONS: dict[str, tuple[Sequence[Backend], Callable[[nn.Module, Callable[..., Any]], Forward | None]]] = {
    "rms_norm": (RMS_NORM, _rms_norm_forward),
    "swiglu": (SWIGLU, _swiglu_forward),
    "rotary": (ROTARY, rotary_forward),
    "patch_embed": (PATCH_EMBED, _patch_forward),
}

FUSED = tuple(_OPERATIONS)


def fuse_ops(model: nn.Module, backends: Mapping[str, str], device: torch.device | None = None) -> dict[str, FusedOp]:
    """Run operations of ``model`` by the named backends, in place; return the result of each operation.

    Backends are ``auto``, ``torch`` (the model's own code) or a name; ``device`` None: where the model is. Raises
    UserError: an operation or backend is unknown, or the backend cannot run on the device.
    """
    device = device or next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return {name: _fuse(model, name, wanted, device) for name, wanted in backends.items()}


def backends_of(operation: str) -> Sequence[Backend]:
    """Return the implementations of an operation, in the order of ``auto``; an unknown one is a UserError."""
    if operation not in _OPERATIONS:
        raise UserError(f"no operation {operation!r}; expected one of {', '.join(_OPERATIONS)}")
    return _OPERATIONS[operation][0]


def has_operation(model: nn.Module, operation: str) -> bool:
    """Whether a module of ``model`` computes ``operation`` in a form that omnitrain recognizes."""
    backends, forward_of = _OPERATIONS[operation]
    return any(forward_of(module, backends[0].run) is not None for module in model.modules())


def _fuse(model: nn.Module, name: str, wanted: str, device: torch.device) -> FusedOp:
    backend = choose(name, backends_of(name), wanted, device)
    done = FusedOp(backend.name)
    if backend.name == "torch":
        return done
    for module in model.modules():
        forward = _OPERATIONS[name][1](module, backend.run)
        if forward is not None:
            set_forward(module, forward)
            done.classes[type(module).__name__] += 1
    return done
