"""Freeze the running statistics of BatchNorm layers, which change in training without a gradient."""

from __future__ import annotations

from torch import nn

from omnitrain.torch_private import BatchNorm


def rest_frozen_statistics(model: nn.Module) -> None:
    """Put frozen BatchNorm layers into evaluation mode.

    In training mode each forward would update their statistics, differently on each rank.
    """
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.weight is not None and not module.weight.requires_grad:
            module.eval()
