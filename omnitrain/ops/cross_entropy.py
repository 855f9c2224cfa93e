"""Cross entropy of a linear head, as unreduced per-token losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``-log softmax(hidden @ weight.T + bias)[labels]``, in fp32.

    Args:
        hidden: ``[N, hidden]``; only rows that have a label, so no logits are made for ignored tokens.
        weight: ``[classes, hidden]``.
        labels: ``[N]`` int64, each in ``[0, classes)``.
        bias: ``[classes]`` or None.

    Returns:
        ``[N]`` fp32 losses in nats. ``N = 0`` gives an empty tensor that still has a gradient path.
    """
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.float(), labels, reduction="none")
