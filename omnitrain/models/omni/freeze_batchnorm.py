"""Statistics that normalizations over batches gather in training: weights that no gradient moves."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def rest_frozen_statistics(model: nn.Module) -> None:
    """Put frozen ones into evaluation mode: else each forward would change them, on each rank in another way."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.weight is not None and not module.weight.requires_grad:
            module.eval()
