"""Build the optimizer of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from omnitrain.errors import UserError
from omnitrain.optim.adamw import ShardedAdamW, require_fp32, trained_parameters
from omnitrain.optim.low_bit import AdamW8bit
from omnitrain.optim.muon import MuonWithAdamW
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.optim.roles import decayed_parameters
from omnitrain.recipe import Optimizer


def build_optimizer(
    model: nn.Module,
    settings: Optimizer,
    offloaded: Collection[nn.Parameter] = (),
    peaks: Mapping[nn.Parameter, float] | None = None,
    decays: Mapping[nn.Parameter, float] | None = None,
    matrices: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters. Weight decay applies to all but norms and biases.

    Args:
        model: the model; its parameters with ``requires_grad`` are trained.
        settings: learning rate, betas, momentum, weight decay.
        offloaded: parameters whose state and fp32 master copy live in host memory.
        peaks: parameter -> peak learning rate, if it differs. Each parameter group stores its peak as ``peak``.
        decays: parameter -> weight decay, if it differs.
        matrices: the parameters that Muon updates; AdamW updates the others.

    Raises:
        UserError: no parameter is trainable, 8-bit states cannot be used, or a trainable parameter without an fp32
            copy is not fp32. Its updates would be rounded away: at learning rate 1e-5 a bf16 weight near 1 never moves.
    """
    trainable, decayed = trained_parameters(model), decayed_parameters(model)
    with_copy, of_muon = set(offloaded), set(matrices)
    require_fp32({name: p.dtype for name, p in trainable.items() if p not in with_copy})
    peaks, decays = peaks or {}, decays or {}
    members: dict[tuple[float, bool, float, bool], list[nn.Parameter]] = {}
    for p in trainable.values():
        decay = decays.get(p, settings.weight_decay) if p in decayed else 0.0
        members.setdefault((peaks.get(p, settings.learning_rate), p in decayed, decay, p in of_muon), []).append(p)
    groups: list[dict[str, Any]] = [
        {"params": of_group, "weight_decay": decay, "peak": peak} | ({"muon": is_muons} if of_muon else {})
        for (peak, _, decay, is_muons), of_group in members.items()
    ]
    kind: Any = partial(MuonWithAdamW, momentum=settings.momentum) if of_muon else ShardedAdamW
    if settings.state == "int8":
        if with_copy:
            raise UserError(
                "train.optimizer.state: found 'int8' with a plan's optimizer_offload, which keeps the state in host "
                "memory; use one of the two"
            )
        kind = AdamW8bit
    make = partial(kind, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
    return OffloadedOptimizer(make, groups, with_copy) if with_copy else make(groups)
