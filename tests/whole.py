"""The weights of a sharded model as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_tensors(values: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Return name -> whole tensor on the CPU; nothing without ``keep``. Every rank with a shard must call this."""
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in values.items()
    }
    return whole if keep else {}
