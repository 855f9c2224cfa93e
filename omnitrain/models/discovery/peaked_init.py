"""Random weights whose attention is not uniform: initial weights hide wrong positions and masks."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def init_peaked_(model: nn.Module, seed: int = 0) -> None:
    """Redraw all weights in place so that attention is peaked and norms and biases matter.

    Matrices are drawn with a gain of 1.5 over their fan-in (embeddings with variance 1), vectors that were constant
    around that constant, others around zero. The result depends on names, shapes and the seed only.
    """
    for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        if parameter.ndim < 2:
            center = 1.0 if parameter.numel() and bool((parameter == 1).all()) else 0.0
            parameter.normal_(center, 0.2, generator=generator)
        else:
            parameter.normal_(0.0, 1.5 / math.sqrt(parameter[0].numel()), generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            generator = torch.Generator().manual_seed(seed * 1_000_003 - 1)
            module.weight.normal_(generator=generator)
