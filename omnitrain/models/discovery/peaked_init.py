"""Draw random weights with peaked attention: HF's initial weights hide wrong positions and masks."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def init_peaked_(model: nn.Module) -> None:
    """Draw all weights again, in place, by names and shapes: attention is peaked, norms and biases matter.

    Matrices have a gain of 1.5 over their fan-in (embeddings: variance 1), vectors are around 1 (if ones) or 0.
    """
    for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator().manual_seed(index)
        if parameter.ndim < 2:
            center = 1.0 if parameter.numel() and bool((parameter == 1).all()) else 0.0
            parameter.normal_(center, 0.2, generator=generator)
        else:
            parameter.normal_(0.0, 1.5 / math.sqrt(parameter[0].numel()), generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            generator = torch.Generator().manual_seed(-1)
            module.weight.normal_(generator=generator)
