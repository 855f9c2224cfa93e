"""The attention that omnitrain registers with transformers: packed samples stay apart, exactly.

A packed row carries ``cu_seqlens``; each segment is its own attention problem, so no value of one sample can reach
another, not even as a masked zero. Runs of equal-length segments (packs are sorted by length) become one batched call
on a view. Without ``cu_seqlens`` (towers, generation) it is transformers' own ``sdpa``, bit for bit.

The registered name contains ``flash``: transformers then hands ``cu_seq_lens_q`` to text layers and towers alike
instead of splitting or masking by itself.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION_NAME = "omnitrain_flash"

# Arguments by which models ask for attention that this implementation would silently leave out.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: list[int],
    *,
    is_causal: bool,
    scale: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention within each segment of one packed row.

    Args:
        query: ``[1, heads, T, head_dim]``.
        key: ``[1, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        value: ``[1, kv_heads, T, value_dim]``.
        cu_seqlens: segment borders, ``[0, ..., T]``.
        is_causal: each token sees itself and earlier ones of its segment; else the whole segment.
        scale: factor on the scores; None: ``head_dim ** -0.5``.
        dropout: probability of dropping an attention weight.

    Returns:
        ``[1, T, heads, value_dim]``, dtype of ``value``.
    """
    outputs = []
    for start, count, length in _equal_runs(cu_seqlens):
        q, k, v = (_fold(x, start, count, length) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=is_causal and length > 1,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        outputs.append(out.transpose(1, 2).reshape(1, count * length, q.size(1), v.size(-1)))
    return torch.cat(outputs, dim=1)


def _equal_runs(cu_seqlens: list[int]) -> list[tuple[int, int, int]]:
    """``[0, 3, 6, 8] -> [(0, 2, 3), (6, 1, 2)]``: (first token, segments, length of each)."""
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    runs, start = [], 0
    for length, group in groupby(lengths):
        count = len(list(group))
        if length:
            runs.append((start, count, length))
        start += count * length
    return runs


def _fold(x_1HTD: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """A view of ``count`` segments as a batch: ``[count, heads, length, head_dim]``."""
    heads, dim = x_1HTD.size(1), x_1HTD.size(3)
    rows = x_1HTD[0, :, start : start + count * length]
    return rows.unflatten(1, (count, length)).transpose(0, 1).reshape(count, heads, length, dim)


def omnitrain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The entry point in transformers' ``AttentionInterface`` (shapes as in :func:`segment_attention`).

    Raises:
        ValueError: the layer asks for something that packed attention does not honour here.
    """
    cu_seqlens = kwargs.pop("cu_seq_lens_q", None)
    if cu_seqlens is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
    borders = cu_seqlens.tolist()
    _refuse_unsupported(module, kwargs, max_length=max(b - a for a, b in pairwise(borders)))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return segment_attention(query, key, value, borders, is_causal=causal, scale=scaling, dropout=dropout), None


def _refuse_unsupported(module: torch.nn.Module, kwargs: dict[str, Any], max_length: int) -> None:
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    window = kwargs.get("sliding_window")
    if window is not None and max_length > window:
        wanted.append(f"sliding_window={window} (longest sample: {max_length} tokens)")
    if wanted:
        raise ValueError(f"{type(module).__name__} asks for {wanted}, which packed attention does not honour")


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Packed rows and whole batches need no mask tensor; left-padded prompts take sdpa's."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def use_omnitrain_attention(model: torch.nn.Module) -> None:
    """Make every transformers module below ``model`` attend through :func:`omnitrain_attention`."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = ATTENTION_NAME


AttentionInterface.register(ATTENTION_NAME, omnitrain_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)
