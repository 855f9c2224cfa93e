"""The part of a tensor that this rank has, as a plain tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, which shares its memory, or a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_shard(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient's part for :func:`local_shard` of its parameter, in the parameter's placements."""
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return local_shard(gradient)
    is_alike = gradient.placements == parameter.placements
    return local_shard(gradient if is_alike else gradient.redistribute(placements=parameter.placements))
