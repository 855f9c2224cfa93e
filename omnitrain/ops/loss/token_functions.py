"""The user's own losses and metrics, as functions of the logits and labels of some tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from omnitrain.errors import UserError

# Logits ``[n, classes]`` fp32, labels ``[n]`` int64 -> one value per token ``[n]``.
TokenFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_losses(function: TokenFunction, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return one loss per token, ``[n]`` fp32.

    Args:
        function: the user's.
        logits: ``[n, classes]``.
        labels: ``[n]``.

    Raises:
        UserError: the function returns something else.
    """
    values = function(logits, labels)
    if not isinstance(values, torch.Tensor) or values.shape != labels.shape:
        found = f"shape {list(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        raise UserError(
            f"{_named(function)} returned {found}; expected one value per label, {list(labels.shape)}, because "
            "omnitrain divides by the number of tokens of the whole step (`reduction='none'`)"
        )
    return values.float()


def with_gradient_of_logits(
    function: TokenFunction, logits: torch.Tensor, labels: torch.Tensor, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one loss per token, and the gradient of their sum by the logits ``[n, classes]`` if it is wanted.

    Raises:
        UserError: the losses do not depend on the logits.
    """
    if not with_gradient:
        with torch.no_grad():
            return token_losses(function, logits.float(), labels), None
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        losses = token_losses(function, leaf, labels)
        if not losses.requires_grad:
            raise UserError(f"{_named(function)} returned losses that do not depend on the logits")
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


@torch.no_grad()
def token_metrics(
    functions: Mapping[str, TokenFunction], logits: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return name -> one value per token ``[n]`` fp32, without gradient."""
    return {name: token_losses(function, logits.detach().float(), labels) for name, function in functions.items()}


def _named(function: TokenFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
