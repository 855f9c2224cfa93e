"""Models whose parameters lie on several ranks, for what needs to know no more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from omnitrain.errors import TrainingError, UserError

T = TypeVar("T")


def is_spread(model: nn.Module) -> bool:
    """Whether ``model``, or one around it, was laid out over ranks; one rank counts, too."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def by_first(work: Callable[[], T]) -> T:
    """Let the first rank do ``work``; no rank goes on before. All of them call this.

    Returns:
        What ``work`` returned, on all ranks; it must pickle.

    Raises:
        UserError: on all ranks, where the first one raised it.
        TrainingError: on the other ranks, where it raised something else; the first one raises that itself.
    """
    done: T | None = None
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            done = work()
        except Exception as error:  # raised again below, when the others know
            failed = error
    told = failed
    if failed is not None and not isinstance(failed, UserError):
        told = TrainingError(f"rank 0 failed: {type(failed).__name__}: {failed}")
    for_all = [told, done]
    dist.broadcast_object_list(for_all, src=0)
    if failed is not None:
        raise failed
    told, done = cast("tuple[Exception | None, T]", for_all)
    if told is not None:
        raise told
    return done
