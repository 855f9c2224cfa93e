"""Build the optimizer of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from omnitrain.errors import UserError
from omnitrain.ops.experts.weights import experts_in, matrix_names
from omnitrain.optim.adamw import ShardedAdamW, require_fp32, trained_parameters
from omnitrain.optim.low_bit import AdamW8bit
from omnitrain.optim.muon import MuonWithAdamW
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.recipe import Optimizer

Role: TypeAlias = Literal["matrix", "vector", "table"]


def roles_of(model: nn.Module) -> dict[nn.Parameter, Role]:
    """Return the role of each parameter, by what it is in its module.

    Shapes do not tell: experts have biases ``[experts, features]``, and norms of heads weights ``[heads, features]``.

    - ``matrix``: the weight of a linear layer ``[out, in]``, and of all experts of a layer ``[experts, ...]``.
    - ``vector``: a norm, a bias (by its name), and all else with fewer than two dims.
    - ``table``: all else: embeddings, positions, convolutions, LoRA adapters of experts.

    ``model``: parallelized or not.
    """
    roles: dict[nn.Parameter, Role] = {}
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False):
            is_vector = is_norm or parameter.ndim < 2 or "bias" in name.split("_")
            roles[parameter] = "vector" if is_vector else "table"
    matrices: list[Any] = [module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    matrices += [getattr(module, name) for _, module in experts_in(model) for name in matrix_names(module)]
    return roles | dict.fromkeys(matrices, "matrix")


def decayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters to which weight decay applies: all but norms and biases."""
    return {parameter for parameter, role in roles_of(model).items() if role != "vector"}


def build_optimizer(
    model: nn.Module,
    settings: Optimizer,
    offloaded: Collection[nn.Parameter] = (),
    peaks: Mapping[nn.Parameter, float] | None = None,
    decays: Mapping[nn.Parameter, float] | None = None,
    matrices: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters. Weight decay applies to all but norms and biases.

    ``offloaded``: parameters whose state and fp32 master copy live in host memory. ``peaks``, ``decays``: parameter ->
    peak learning rate (stored as ``peak`` of its group) or decay, if it differs. ``matrices``: what Muon updates; AdamW
    the others. Raises UserError: no parameter is trainable, 8-bit states cannot be used, or a trainable parameter
    without an fp32 copy is not fp32: at learning rate 1e-5 a bf16 weight near 1 never moves.
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
                "train.optimizer.state: found 'int8' with `memory.offload: [optimizer]` of a plan, which keeps the "
                "state in host memory; use one of the two"
            )
        kind = AdamW8bit
    make = partial(kind, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
    return OffloadedOptimizer(make, groups, with_copy) if with_copy else make(groups)
