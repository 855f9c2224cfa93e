"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients together.

    Args:
        parameters: those without a gradient count as zero.

    Returns:
        Scalar fp32 on the gradients' device; zero where there are none.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm([gradient.float() for gradient in gradients])).norm()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scale all gradients so that their global norm is ``max_norm`` at most.

    Args:
        parameters: whose gradients are scaled in place.
        max_norm: None: only measure.

    Returns:
        The norm before clipping, scalar fp32.
    """
    owners = list(parameters)
    norm = gradient_norm(owners)
    gradients = [p.grad for p in owners if p.grad is not None]
    if max_norm is not None and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
