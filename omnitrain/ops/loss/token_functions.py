"""The user's own losses and metrics, as functions of the logits and labels of some tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from omnitrain.errors import UserError

# Logits ``[n, classes]`` fp32, labels ``[n]`` int64, by name hidden states ``[n, width]`` fp32 of the teachers that are
# among its parameters -> one value per token ``[n]``.
TokenFunction = Callable[..., Tensor]
# Name of a teacher -> its hidden states ``[n, width]``.
TeacherRows = Mapping[str, Tensor]


def further_parameters(function: TokenFunction) -> dict[str, bool]:
    """Return parameter of a function after logits and labels -> whether it has a default."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:  # compiled functions may not say theirs
        return {}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    further = positional[2:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return {p.name: p.default is not p.empty for p in further if p.kind is not p.POSITIONAL_ONLY}


def token_losses(
    function: TokenFunction, logits: Tensor, labels: Tensor, teachers: TeacherRows | None = None
) -> Tensor:
    """Return one loss of ``function`` per token, ``[n]`` fp32; a UserError if it returns something else."""
    read = (
        {name: teachers[name].float() for name in further_parameters(function) if name in teachers} if teachers else {}
    )
    values = function(logits, labels, **read)
    if not isinstance(values, Tensor) or values.shape != labels.shape:
        found = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise UserError(
            f"{_named(function)} returned {found}; expected one value per label, {list(labels.shape)}, because "
            "omnitrain divides by the number of tokens of the whole step (`reduction='none'`)"
        )
    return values.float()


def with_gradient_of_logits(
    function: TokenFunction, logits: Tensor, labels: Tensor, teachers: TeacherRows, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return one loss per token, and the gradient of their sum by the logits ``[n, classes]`` if it is wanted."""
    if not with_gradient:
        with torch.no_grad():
            return token_losses(function, logits.float(), labels, teachers), None
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        losses = token_losses(function, leaf, labels, teachers)
        if not losses.requires_grad:
            raise UserError(f"{_named(function)} returned losses that do not depend on the logits")
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


@torch.no_grad()
def token_metrics(
    functions: Mapping[str, TokenFunction], logits: Tensor, labels: Tensor, teachers: TeacherRows
) -> dict[str, Tensor]:
    """Return name -> one value per token ``[n]`` fp32, without gradient."""
    of_tokens = logits.detach().float(), labels, teachers
    return {name: token_losses(function, *of_tokens) for name, function in functions.items()}


def _named(function: TokenFunction) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
