"""The weights of a sharded model as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_tensors(values: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Return name -> whole tensor on the CPU; nothing without ``keep``. Every rank with a shard must call this."""
    whole = {
        value: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for value in dict.fromkeys(values.values())  # tied names share one tensor
    }
    return {name: whole[value] for name, value in values.items()} if keep else {}
