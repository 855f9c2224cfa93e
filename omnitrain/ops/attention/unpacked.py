"""Attention and masks of unpacked input: bit for bit what transformers computes without omnitrain."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from omnitrain.errors import UserError

SDPA, EAGER = "sdpa", "eager"

# Only a model's eager code computes these: transformers' sdpa raises on one and ignores the other.
_EAGER_ONLY = ("softcap", "s_aux")
# If the implementation is not called sdpa or eager, models pass their choice of keys to attention by these arguments:
# indices of keys, or of blocks of keys, which only the model's own code can interpret.
_CHOSEN_KEYS, _CHOSEN_BLOCKS = "indices", "block_indices"


def plain_mask(implementation: str, **arguments: Any) -> Tensor | None:
    """Return transformers' mask for ``implementation``."""
    return AttentionMaskInterface()[implementation](**arguments)


def plain_attention(
    implementation: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by ``implementation``, by the model's eager code if that ignores an argument, or raise UserError."""
    if kwargs.get(_CHOSEN_BLOCKS) is not None:
        raise UserError(f"{type(module).__name__} passes {_CHOSEN_BLOCKS} to its attention, which is not supported")
    if (indices := kwargs.pop(_CHOSEN_KEYS, None)) is not None:
        attention_mask = _of_chosen_keys(module, attention_mask, indices, key.size(2))
    # Some models pass on padding [B, keys] if the implementation's name contains `flash`.
    flat = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    if implementation in (SDPA, EAGER) and flat is not None and flat.shape != (query.size(2), key.size(2)):
        raise UserError(
            f"{type(module).__name__} passes a padding mask of shape {tuple(flat.shape)} to its attention, "
            "which is not supported"
        )
    if implementation == EAGER:
        return own_eager(module)(module, query, key, value, attention_mask, **kwargs)
    if implementation == SDPA and any(kwargs.get(name) is not None for name in _EAGER_ONLY):
        mask = _additive(module, query, key, attention_mask, kwargs.get("is_causal"))
        return own_eager(module)(module, query, key, value, mask, **kwargs)
    function = AttentionInterface()[implementation]
    return function(module, query, key, value, attention_mask, **kwargs)


def own_eager(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the eager attention function that the forward of ``module`` names in its file; else a UserError."""
    forward = inspect.unwrap(type(module).forward)
    names = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
    function = forward.__globals__.get(names[0] if names else "eager_attention_forward")
    if function is None:
        raise UserError(
            f"{type(module).__name__} needs an `eager_attention_forward` in its modeling file for this call, and the "
            "file has none"
        )
    return function


def _of_chosen_keys(module: torch.nn.Module, mask: Tensor | None, indices: Tensor, num_keys: int) -> Tensor:
    """Mask out all keys but those in ``indices`` ``[B, T, chosen]``, as models do for sdpa and eager."""
    if mask is None:
        raise UserError(f"{type(module).__name__} passes {_CHOSEN_KEYS} to its attention, but makes no mask")
    closed = torch.ones(*indices.shape[:2], num_keys, dtype=torch.bool, device=mask.device)
    closed = closed.scatter(-1, indices.long(), False).unsqueeze(1)
    return mask & ~closed if mask.dtype == torch.bool else mask.masked_fill(closed, torch.finfo(mask.dtype).min)


def _additive(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """Convert sdpa's mask (boolean, or None with ``is_causal``) to eager code's mask, which is added to the scores."""
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or query.size(2) == 1:
            return None
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), torch.finfo(query.dtype).min)
