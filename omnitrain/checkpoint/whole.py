"""Gather the weights of a sharded model as whole tensors by name, for any layout."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_tensors(values: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Return whole tensors on the CPU. Every rank that holds a shard must call this.

    Args:
        values: name -> parameter or buffer, sharded or not; the same names in the same order on all ranks.
        keep: False: only take part in the collectives. The result is empty, and this rank never holds more than one
            whole tensor.

    Returns:
        Name -> tensor. Names of tied parameters share one tensor.
    """
    whole: dict[int, Tensor] = {}
    kept = {}
    for name, value in values.items():
        if id(value) not in whole:
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            whole[id(value)] = tensor.detach().cpu() if keep else tensor.new_empty(0)
        if keep:
            kept[name] = whole[id(value)]
    return kept
