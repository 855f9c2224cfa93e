"""The softmax of logits of which each rank has the columns of its own classes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from omnitrain.ops.collectives import gathered


def sharded_softmax(
    logits: torch.Tensor, labels: torch.Tensor, out: torch.Tensor, with_gradient: bool, *, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses of rows of logits, and the part of their gradient that belongs to this rank's classes.

    One collective, of two numbers per row and rank.

    Args:
        logits: ``[n, classes of a rank]``; ranks have equally many classes, in their order.
        labels: ``[n]`` int64, numbered over all ranks' classes, the same on every rank.
        out: ``[n, classes of a rank]`` fp32; overwritten.
        with_gradient: whether it is asked for.
        group: of the ranks that share the classes.

    Returns:
        ``[n]`` losses, the same on every rank, and softmax minus one-hot in ``out``.
    """
    width = logits.size(1)
    is_known = (labels >= 0) & (labels < group.size() * width)
    torch._assert_async(is_known.all(), "a label is out of range")
    own = labels - group.rank() * width
    is_own, at = (own >= 0) & (own < width), own.clamp(0, width - 1)[:, None]
    top = logits.amax(1).float()
    torch.sub(logits, top[:, None], out=out).exp_()
    target = logits.gather(1, at).squeeze(1).float().masked_fill_(~is_own, 0.0)
    everyones = gathered(torch.stack([top + out.sum(1).log(), target]), group)
    normalizer, target = everyones[:, 0].logsumexp(0), everyones[:, 1].sum(0)
    losses = normalizer - target
    if not with_gradient:
        return losses, None
    out.mul_((top - normalizer).exp_()[:, None])
    return losses, out.scatter_add_(1, at, -is_own.to(out.dtype)[:, None])
