"""Memory and time of the divergence from a teacher inside the heads of both, against all logits of both.

One batch, fp32, one thread: 1536 tokens, 150,000 classes, hidden size 512 of the student and 1024 of the teacher, the
gradients of the student's hidden states and weight. ``plain`` is torch's: all logits of both, then ``F.kl_div``. Both
sides take turns in one process for the time. Peak memory is that of a process of its own per side, as in
``benchmarks/loss.py``: hidden states and weights of both models are not in it, the gradients are. Linux only.
"""

from __future__ import annotations

import sys
from argparse import Namespace

import torch
import torch.nn.functional as F
from harness import report
from loss import compare, options_of
from torch import Tensor

from omnitrain.ops.loss.divergence import Divergence, Taught, linear_divergence

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def plain(hidden: Tensor, weight: Tensor, states: Tensor, layer: Tensor) -> Tensor:
    """Compute the divergence from all logits of both."""
    teacher = F.log_softmax(F.linear(states, layer), dim=-1)
    student = F.log_softmax(F.linear(hidden, weight), dim=-1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True)


def chunked(hidden: Tensor, weight: Tensor, states: Tensor, layer: Tensor) -> Tensor:
    """Compute omnitrain's divergence."""
    return linear_divergence(hidden, weight, Taught(states, layer, None, len(layer)), Divergence()).sum


def batch(sizes: Namespace) -> Batch:
    """Draw hidden states and output layers of both."""
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True)
    weight = torch.randn(sizes.classes, sizes.hidden).div_(sizes.hidden**0.5).requires_grad_()
    layer = torch.randn(sizes.classes, 2 * sizes.hidden).div_((2 * sizes.hidden) ** 0.5)
    return hidden, weight, torch.randn(sizes.tokens, 2 * sizes.hidden), layer


def main() -> None:
    """Measure and report."""
    given = options_of(sys.modules[__name__].__doc__ or "", tokens=1536, rounds=3)
    report(compare("divergence", {"chunked": chunked, "plain": plain}, batch, given, rtol=1e-5), given.json)


if __name__ == "__main__":
    main()
