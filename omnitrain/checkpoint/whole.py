"""Gather the weights of a sharded model as whole tensors by name, for any layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.peers import SINGLE_PROCESS, Peers


def whole_tensors(
    values: Mapping[str, Tensor],
    *,
    keep: bool = True,
    holders: Mapping[str, int] | None = None,
    peers: Peers = SINGLE_PROCESS,
) -> dict[str, Tensor]:
    """Return whole tensors on the CPU. Every rank that holds a shard must call this.

    Args:
        values: name -> parameter or buffer, sharded or not; the same names in the same order on all ranks. What only
            other pipeline stages hold is on the meta device.
        keep: False: only take part in the collectives. The result is empty, and this rank never holds more than one
            whole tensor.
        holders: see :func:`holders_of`. None: every rank holds a shard of everything.
        peers: all ranks of the model.

    Returns:
        Name -> tensor. Names of tied parameters share one tensor.
    """
    whole: dict[int, Tensor] = {}
    kept = {}
    for name, value in values.items():
        if id(value) not in whole:
            tensor = value.full_tensor() if isinstance(value, DTensor) and not value.is_meta else value
            if holders is not None and name in holders:
                tensor = _from(holders[name], tensor, peers)
            whole[id(value)] = tensor.detach().cpu() if keep else tensor.new_empty(0)
        if keep:
            kept[name] = whole[id(value)]
    return kept


def holders_of(values: Mapping[str, Tensor], peers: Peers) -> dict[str, int]:
    """Return name -> the first rank that holds it, for what some pipeline stages do not hold.

    Args:
        values: see :func:`whole_tensors`.
        peers: all ranks of the model, which all call this.
    """
    missing = peers.gather({name for name, value in values.items() if value.is_meta})
    return {
        name: next(rank for rank, names in enumerate(missing) if name not in names)
        for name in values
        if any(name in names for names in missing)
    }


def _from(holder: int, tensor: Tensor, peers: Peers) -> Tensor:
    """Return the tensor of the rank ``holder``, on the CPU."""
    if tensor.is_meta:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
    sent = tensor.detach().cpu().contiguous()
    dist.broadcast(sent, group=peers.group, group_src=holder)
    return sent
