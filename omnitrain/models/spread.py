"""Models whose parameters lie on several ranks, for what needs to know no more than that."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from omnitrain.errors import TrainingError


def is_spread(model: nn.Module) -> bool:
    """Whether ``model``, or one around it, was laid out over ranks; one rank counts, too."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def by_first(write: Callable[[], object]) -> None:
    """Let the first rank ``write``; no rank goes on before. All of them call this.

    Raises:
        TrainingError: on the other ranks, where the first one could not; that one raises the error itself.
    """
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as error:  # raised again below, when the others know
            failed = error
    told = [failed and f"rank 0 failed: {type(failed).__name__}: {failed}"]
    dist.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
    if told[0] is not None:
        raise TrainingError(told[0])
