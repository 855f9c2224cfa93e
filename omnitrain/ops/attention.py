"""The attention that omnitrain registers with transformers: packed samples stay apart, exactly.

A packed row carries ``cu_seqlens``; each segment is its own attention problem, so no value of one sample can reach
another, not even as a masked zero. Neighbouring segments of about equal length (packs are sorted by length) become one
batched call. Without ``cu_seqlens`` (towers, generation) it is transformers' own ``sdpa``, bit for bit.

The registered name contains ``flash``: transformers then hands ``cu_seq_lens_q`` to text layers and towers alike
instead of splitting or masking by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from omnitrain.errors import UserError

ATTENTION_NAME = "omnitrain_flash"

# Arguments by which models ask for attention that this implementation would silently leave out.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")

# A causal segment may be filled up behind its end to this multiple of its length, to share a call with longer ones.
_CAUSAL_SLACK = 1.25


@dataclass(frozen=True)
class SegmentBatch:
    """Neighbouring segments that share one attention call.

    Attributes:
        tokens: of all its segments.
        count: segments.
        length: of the longest; the others are filled up behind their ends.
        padded_rows: ``[count * length]``, which of the ``tokens`` stands at each place of the batch; None: as they are.
        real_places: ``[tokens]``, the place of each token in the batch; None: as they are.
    """

    tokens: int
    count: int
    length: int
    padded_rows: torch.Tensor | None
    real_places: torch.Tensor | None


@lru_cache(maxsize=16)
def segment_batches(borders: tuple[int, ...], slack: float, device: torch.device) -> tuple[SegmentBatch, ...]:
    """Greedy batches of neighbouring segments.

    Args:
        borders: ``(0, ..., T)``, as in ``cu_seqlens``.
        slack: the longest segment of a batch is at most this many times the shortest; 1: equal lengths only.
        device: of the index tensors.
    """
    groups: list[list[int]] = []
    for length in (stop - start for start, stop in pairwise(borders) if stop > start):
        if groups and max(length, *groups[-1]) <= slack * min(length, *groups[-1]):
            groups[-1].append(length)
        else:
            groups.append([length])
    return tuple(_segment_batch(lengths, device) for lengths in groups)


def _segment_batch(lengths: list[int], device: torch.device) -> SegmentBatch:
    tokens, count, longest = sum(lengths), len(lengths), max(lengths)
    if tokens == count * longest:
        return SegmentBatch(tokens, count, longest, None, None)
    sizes = torch.tensor(lengths)[:, None]
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(longest)[None]
    rows = starts + place.minimum(sizes - 1)  # behind its end a segment repeats its last token, which nobody attends to
    real = (place < sizes).flatten().nonzero().flatten()
    return SegmentBatch(tokens, count, longest, rows.flatten().to(device), real.to(device))


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

    Causal segments of a batch may be filled up behind their ends: what stands there is seen by no real token, and its
    own output is dropped, so outputs and gradients are those of each segment alone.

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
    batches = segment_batches(tuple(cu_seqlens), _CAUSAL_SLACK if is_causal else 1.0, query.device)
    sizes = [batch.tokens for batch in batches]
    parts = zip(batches, query[0].split(sizes, 1), key[0].split(sizes, 1), value[0].split(sizes, 1), strict=True)
    outputs = []
    for batch, *rows in parts:
        q, k, v = (_fold(x_HTD, batch) for x_HTD in rows)
        causal = is_causal and batch.length > 1
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        out_THD = out.transpose(1, 2).flatten(0, 1)
        outputs.append(out_THD if batch.real_places is None else out_THD.index_select(0, batch.real_places))
    return torch.cat(outputs)[None]


def _fold(x_HTD: torch.Tensor, batch: SegmentBatch) -> torch.Tensor:
    """``[heads, tokens, head_dim] -> [count, heads, length, head_dim]``."""
    rows = x_HTD if batch.padded_rows is None else x_HTD.index_select(1, batch.padded_rows)
    return rows.unflatten(1, (batch.count, batch.length)).transpose(0, 1)


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
        UserError: the layer asks for something that packed attention does not honour here.
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
        raise UserError(f"{type(module).__name__} asks for {wanted}, which packed attention does not honour")


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
