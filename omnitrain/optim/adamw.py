"""AdamW with fp32 state, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.errors import UserError
from omnitrain.recipe import Optimizer
from omnitrain.torch_private import AdamW


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, which shares its memory, or a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_shard(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient's part for :func:`local_shard` of its parameter, in the parameter's placements."""
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return local_shard(gradient)
    is_alike = gradient.placements == parameter.placements
    return local_shard(gradient if is_alike else gradient.redistribute(placements=parameter.placements))


class ShardedAdamW(AdamW):
    """torch's AdamW; each rank updates its shards as plain tensors, and the state dict has DTensors as before.

    DTensor would derive a sharding for the lists of all tensors, and hash these lists in each step.
    """

    def init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[torch.Tensor],
        grads: list[torch.Tensor],
        *states: list[torch.Tensor],
    ) -> bool:
        """Fill the lists with this rank's shards."""
        has_complex = super().init_group(group, params_with_grad, grads, *states)
        grads[:] = map(gradient_shard, grads, params_with_grad)
        for tensors in (params_with_grad, *states):
            tensors[:] = map(local_shard, tensors)
        return has_complex


def require_fp32(dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise a UserError if trained parameters without an fp32 copy are not fp32."""
    if low := sorted(name for name, dtype in dtypes.items() if dtype != torch.float32):
        raise UserError(
            f"{len(low)} trainable tensors are not float32 ({low[0]}, ...); leave precision.param of the plan unset, "
            "or set `memory.offload: [optimizer]`, which keeps an fp32 copy. If you build the model yourself, use "
            "torch_dtype=torch.float32"
        )


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter with ``requires_grad``; raise a UserError if there is none."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UserError("no parameter is trainable: model.freeze and the plan's freeze cover every component")
    return trained


def learning_rate(step: int, steps: int, settings: Optimizer, peak: float) -> float:
    """Return the learning rate of ``step`` (from 0) of ``steps``: linear warm-up to ``peak``, then `schedule`."""
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    progress = min(1.0, (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (settings.final_ratio + (1 - settings.final_ratio) * left)
