"""The gated MLP ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from omnitrain.ops.registry import Backend, liger_missing

_PARTS = ("gate_proj", "up_proj", "down_proj")


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, same shapes."""
    return F.silu(gate) * up


def _liger_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


# On CPU a hand-written backward was not faster than autograd's.
SWIGLU = (Backend("torch", silu_mul), Backend("liger", _liger_silu_mul, liger_missing, automatic=()))


def swiglu_forward(module: Any, x: Tensor, silu_mul: Any = silu_mul) -> Tensor:
    """Compute a gated MLP with the projections of ``module``; ``x``: ``[..., hidden]``."""
    return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))


def is_swiglu(module: nn.Module) -> bool:
    """Whether ``module`` computes :func:`swiglu_forward`, tested with small random weights of the same names."""
    if not all(type(getattr(module, part, None)) is nn.Linear for part in _PARTS):
        return False
    if {name.partition(".")[0] for name, _ in module.named_parameters()} != set(_PARTS):
        return False
    with torch.device("cpu"):
        return _behaves_as_swiglu(module)


def _behaves_as_swiglu(module: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    biased = [part for part in _PARTS if module.get_submodule(part).bias is not None]
    biases = {f"{part}.bias": torch.randn(shapes[part][0], generator=generator) for part in biased}
    x = torch.randn(3, 4, generator=generator)
    try:
        theirs = functional_call(module, weights | biases, (x,))
    except Exception:  # it does not take one tensor of rows
        return False
    ours = functional_call(_Reference(module), {f"mlp.{k}": v for k, v in (weights | biases).items()}, (x,))
    return isinstance(theirs, Tensor) and torch.equal(theirs, ours)


class _Reference(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_forward(self.mlp, x)
