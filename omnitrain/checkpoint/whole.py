"""Weights of a sharded model as whole tensors by name: the same for every layout, and for one process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_weights(model: torch.nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """The model's ``state_dict`` with whole tensors on the CPU. Every rank that holds a part must call it.

    Args:
        model: sharded or not.
        keep: False: only take part; what comes back is empty, and this rank never has more than one whole tensor.

    Returns:
        Name -> tensor; names of tied parameters share one.
    """
    whole: dict[int, Tensor] = {}
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            whole[id(value)] = tensor.detach().cpu() if keep else torch.empty(0)
        if keep:
            weights[name] = whole[id(value)]
    return weights
