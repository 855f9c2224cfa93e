"""The softmax over a vocabulary that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.collectives import gathered
from omnitrain.torch_private import assert_async


def sharded_softmax(
    logits: Tensor, labels: Tensor, wide: Callable[[int], Tensor], with_gradient: bool, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses ``[n]`` of tokens, the same on every rank, and softmax minus one-hot of this rank's columns.

    ``logits`` are ``[n, classes of a rank]``; all ranks of ``group`` have equally many classes, in rank order.
    ``labels`` ``[n]`` int64 are indices over all ranks' classes, the same on every rank. ``wide``: n -> a buffer ``[n,
    classes of a rank]`` fp32, for the gradient. It needs one collective of two numbers per token and rank.
    """
    width, out = logits.size(1), wide(len(logits))
    require_labels(labels, group.size() * width)
    local_labels = labels - group.rank() * width
    is_local, column = (local_labels >= 0) & (local_labels < width), local_labels.clamp(0, width - 1)[:, None]
    top = logits.amax(1).float()
    torch.sub(logits, top[:, None], out=out).exp_()
    target = logits.gather(1, column).squeeze(1).float().masked_fill_(~is_local, 0.0)
    of_ranks = gathered(torch.stack([top + out.sum(1).log(), target]), group)
    normalizer, target = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)
    losses = normalizer - target
    if not with_gradient:
        return losses, None
    out.mul_((top - normalizer).exp_()[:, None])
    return losses, out.scatter_add_(1, column, -is_local.to(out.dtype)[:, None])


def require_labels(labels: Tensor, classes: int) -> None:
    """Raise a RuntimeError on the device, without waiting on the host, if a label is not in ``[0, classes)``."""
    assert_async(((labels >= 0) & (labels < classes)).all(), "a label is out of range")
