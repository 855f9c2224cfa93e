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
    """The implementation of one operation in a model.

    ``classes``: class name -> number of modules that now use it; empty if ``backend`` is ``torch``, the model's code.
    """

    backend: str
    classes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Operation:
    """``forward_of(module, run)``: the new forward of ``module``; None: the module is not of this operation."""

    backends: Sequence[Backend]
    forward_of: Callable[[nn.Module, Callable[..., Any]], Forward | None]


def _rms_norm_forward(module: nn.Module, run: Callable[..., Any]) -> Forward | None:
    form = rms_norm_form(module)
    if form is None:
        return None
    name = next((name for name, _ in module.named_parameters()), None)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return run(x, None if name is None else getattr(self, name), form)

    return forward


def _swiglu_forward(module: nn.Module, run: Callable[..., Any]) -> Forward | None:
    if not is_swiglu(module):
        return None
    return lambda self, x: swiglu_forward(self, x, run)


def _patch_forward(module: nn.Module, run: Callable[..., Any]) -> Forward | None:
    if not is_patch_embedding(module):
        return None
    return lambda self, x: run(x, self.weight, self.bias)


_OPERATIONS = {
    "rms_norm": _Operation(RMS_NORM, _rms_norm_forward),
    "swiglu": _Operation(SWIGLU, _swiglu_forward),
    "rotary": _Operation(ROTARY, rotary_forward),
    "patch_embed": _Operation(PATCH_EMBED, _patch_forward),
}

FUSED = tuple(_OPERATIONS)


def fuse_ops(model: nn.Module, backends: Mapping[str, str], device: torch.device | None = None) -> dict[str, FusedOp]:
    """Run operations of ``model`` by the named backends, in place; return the result of each operation.

    Args:
        model: the model, on any device.
        backends: operation (``rms_norm``, ``swiglu``, ``rotary``, ``patch_embed``) -> ``auto``, ``torch`` (the model's
            own code) or another backend's name.
        device: device on which the model will run; None: its current device.

    Raises:
        UserError: an operation or backend is unknown, or the backend cannot run on the device.
    """
    device = device or next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return {name: _fuse(model, name, wanted, device) for name, wanted in backends.items()}


def backends_of(operation: str) -> Sequence[Backend]:
    """Return the implementations of an operation, in the order of ``auto``; an unknown one is a UserError."""
    if operation not in _OPERATIONS:
        raise UserError(f"no operation {operation!r}; expected one of {', '.join(_OPERATIONS)}")
    return _OPERATIONS[operation].backends


def has_operation(model: nn.Module, operation: str) -> bool:
    """Whether a module of ``model`` computes ``operation`` in a form that omnitrain recognizes."""
    forward_of, run = _OPERATIONS[operation].forward_of, backends_of(operation)[0].run
    return any(forward_of(module, run) is not None for module in model.modules())


def _fuse(model: nn.Module, name: str, wanted: str, device: torch.device) -> FusedOp:
    backend = choose(name, backends_of(name), wanted, device)
    done = FusedOp(backend.name)
    if backend.name == "torch":
        return done
    for module in model.modules():
        forward = _OPERATIONS[name].forward_of(module, backend.run)
        if forward is not None:
            set_forward(module, forward)
            done.classes[type(module).__name__] += 1
    return done
