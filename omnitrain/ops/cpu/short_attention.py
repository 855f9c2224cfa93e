"""Causal attention over short segments on CPU: explicit scores, in few large calls.

Torch's kernel processes one segment and head after the other, with small products and much overhead; for about ten
tokens it is slower than computing all scores. A sequence also has only one backward here, which gathers once where
autograd would slice, pad, scatter and concatenate batch by batch.

Shapes: ``H`` heads, ``K`` key heads, ``G = H / K``; ``T`` tokens; of a batch: ``B`` segments, ``L`` its longest length,
``Q`` queries of a segment (``L``, unless some are skipped); ``D`` and ``E`` the widths of a query and of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnitrain.torch_private import softmax_backward


@dataclass(frozen=True)
class ShortBatch:
    """Segments that share a matmul, padded at their ends."""

    length: int  # L
    num_queries: int  # B * K * G * Q, padded
    num_keys: int  # B * K * L, padded
    hidden: Tensor  # [1 or B * K, G * Q, L] fp32, 0 if a query sees a key, else -inf
    is_real: Tensor | None  # [B * K, G * Q, 1] fp32, 0 for padding, else 1; None: no padding


@dataclass(frozen=True)
class _Padded:
    """A padded batch, ``[B, n]`` each: the token, its position in its segment, and whether it is real.

    These are numpy arrays: for a few numbers the overhead of a torch call exceeds its work.
    """

    tokens: np.ndarray
    positions: np.ndarray
    is_real: np.ndarray

    def taken(self, order: np.ndarray, is_real: np.ndarray) -> _Padded:
        """Select by index ``[B, m]``."""
        return _Padded(*(np.take_along_axis(x, order, axis=1) for x in (self.tokens, self.positions, is_real)))


@dataclass(frozen=True)
class ShortKeys:
    """The batches of a sequence and the indices of their keys; layers with different queries share them."""

    tokens: int  # T
    heads: int  # K
    batches: tuple[_Padded, ...]  # the padded positions of each batch, in order of the sequence
    rows: Tensor  # for each padded key, its row of [T * K, D]
    padded: Tensor  # [T * K], the padded position of each of these rows


@dataclass(frozen=True)
class ShortSegments:
    """The batches of a sequence, and the indices of its tokens in them. Each head is contiguous, as matmuls need."""

    keys: ShortKeys  # the keys of the sequence
    batches: tuple[ShortBatch, ...]  # the batches, in order of the sequence
    queries: Tensor  # for each padded query, its row of [T * H, D]
    query_positions: Tensor  # for each requested row, its padded position
    requested: Tensor | None  # the requested rows of [T * H, D]; None: all. The output of the others is zero

    @property
    def tokens(self) -> int:
        """``T``."""
        return self.keys.tokens

    def of_queries(self, x: Tensor) -> list[Tensor]:
        """Split padded queries ``[n, width]`` into views ``[B * K, G * Q, width]``, one per batch."""
        return self._of_batches(x, [batch.num_queries for batch in self.batches])

    def of_keys(self, x: Tensor) -> list[Tensor]:
        """Split padded keys ``[n, width]`` into views ``[B * K, L, width]``, one per batch."""
        return self._of_batches(x, [batch.num_keys for batch in self.batches])

    def _of_batches(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        numbers = (batch.num_keys // batch.length for batch in self.batches)
        return [part.view(number, -1, x.size(1)) for part, number in zip(x.split(sizes), numbers, strict=True)]


def short_keys(groups: Sequence[Sequence[int]], heads: int) -> ShortKeys:
    """Compute the indices of a sequence's keys; ``groups``: lengths of the segments of each batch, in order."""
    batches = tuple(_padded_batches(groups))
    rows, _, padded = _by_head(batches, heads)
    return ShortKeys(sum(map(sum, groups)), heads, batches, rows, padded)


def short_segments(keys: ShortKeys, heads: int, read: Tensor | None) -> ShortSegments:
    """Compute the indices of a sequence's queries; ``read`` ``[T]``: the tokens whose output is used; None: all."""
    queries = keys.batches if read is None else [_only_read(padded, read.numpy()) for padded in keys.batches]
    batches = tuple(_batch(*pair, heads, keys.heads) for pair in zip(queries, keys.batches, strict=True))
    rows, requested, padded = _by_head(queries, heads)
    return ShortSegments(keys, batches, rows, padded, None if read is None else requested)


def attend_short(query: Tensor, key: Tensor, value: Tensor, segments: ShortSegments, scale: float) -> Tensor:
    """Attend: ``query`` ``[T, H, D]``, ``key`` ``[T, K, D]``, ``value`` ``[T, K, E]`` -> ``[T, H, E]``, all fp32."""
    return _AttendShort.apply(query, key, value, segments, scale)


class _AttendShort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: ShortSegments, scale: float) -> Tensor:
        keys = segments.keys.rows
        q, k, v = _gathered(query, segments.queries), _gathered(key, keys), _gathered(value, keys)
        views = (segments.of_queries(q), segments.of_keys(k), segments.of_keys(v))
        outputs, kept = [], []
        for batch, q_NQD, k_NLD, v_NLE in zip(segments.batches, *views, strict=True):
            weights = torch.baddbmm(batch.hidden, q_NQD, k_NLD.transpose(1, 2), alpha=scale).softmax(-1)
            if batch.is_real is not None:
                weights *= batch.is_real  # what was filled up has no output, and so no gradient
            outputs.append((weights @ v_NLE).flatten(0, 1))  # anew: a selective recompute keeps what products return
            kept.append(weights)
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(q, k, v, *kept)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _put_back(output, segments.query_positions, segments.tokens, segments.requested, query.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        segments: ShortSegments = ctx.segments
        q, k, v, *kept = ctx.saved_tensors
        g = _gathered(grad, segments.queries)
        of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        of_queries = (segments.of_queries(x) for x in (q, g, of_q))
        of_keys = (segments.of_keys(x) for x in (k, v, of_k, of_v))
        for weights, q_NQD, g_NQE, of_q_NQD, k_NLD, v_NLE, of_k_NLD, of_v_NLE in zip(
            kept, *of_queries, *of_keys, strict=True
        ):
            of_weights = g_NQE @ v_NLE.transpose(1, 2)
            of_scores = softmax_backward(of_weights, weights, -1, weights.dtype).mul_(ctx.scale)
            torch.bmm(of_scores, k_NLD, out=of_q_NQD)
            torch.bmm(of_scores.transpose(1, 2), q_NQD, out=of_k_NLD)
            torch.bmm(weights.transpose(1, 2), g_NQE, out=of_v_NLE)
        return (
            _put_back(of_q, segments.query_positions, segments.tokens, segments.requested, grad.size(1)),
            _put_back(of_k, segments.keys.padded, segments.tokens, None, segments.keys.heads),
            _put_back(of_v, segments.keys.padded, segments.tokens, None, segments.keys.heads),
            None,
            None,
        )


def _gathered(x_THD: Tensor, rows: Tensor) -> Tensor:
    return x_THD.flatten(0, 1).index_select(0, rows)


def _put_back(x: Tensor, padded: Tensor, tokens: int, rows: Tensor | None, heads: int) -> Tensor:
    """Return ``[T, heads, width]`` with ``x[padded]`` in ``rows`` of its first two dims (None: all), else zeros."""
    # No view: compiled code that takes it would depend on what it is a view of.
    out = (x.new_empty if rows is None else x.new_zeros)(tokens, heads, x.size(1))
    if rows is None:
        torch.index_select(x, 0, padded, out=out.flatten(0, 1))
    else:
        out.flatten(0, 1).index_copy_(0, rows, x.index_select(0, padded))
    return out


def _padded_batches(groups: Sequence[Sequence[int]]) -> list[_Padded]:
    batches, start = [], 0
    for lengths in groups:
        sizes = np.array(lengths)[:, None]
        starts, position = start + sizes.cumsum(0) - sizes, np.arange(max(lengths))[None].repeat(len(lengths), 0)
        # Padding repeats the last token of a segment; no token attends to it.
        batches.append(_Padded(starts + np.minimum(position, sizes - 1), position, position < sizes))
        start += sum(lengths)
    return batches


def _only_read(padded: _Padded, read: np.ndarray) -> _Padded:
    """Select the tokens that are read; segments with fewer tokens than the longest are padded."""
    is_read = read[padded.tokens] & padded.is_real
    most = max(int(is_read.sum(1).max()), 1)
    return padded.taken((~is_read).argsort(axis=1, kind="stable")[:, :most], is_read)


def _batch(queries: _Padded, keys: _Padded, heads: int, key_heads: int) -> ShortBatch:
    length, group = keys.tokens.shape[1], heads // key_heads
    positions = queries.positions[:1] if queries is keys else queries.positions  # as in every segment, or not
    hidden = np.where(positions[:, :, None] < np.arange(length), np.float32("-inf"), np.float32(0))
    if len(hidden) > 1:
        hidden = hidden.repeat(key_heads, 0)
    is_real = np.tile(queries.is_real.astype(np.float32).repeat(key_heads, 0), (1, group))[:, :, None]
    return ShortBatch(
        length=length,
        num_queries=queries.tokens.size * heads,
        num_keys=keys.tokens.size * key_heads,
        hidden=torch.from_numpy(np.tile(hidden, (1, group, 1))),
        is_real=None if is_real.all() else torch.from_numpy(is_real),
    )


def _by_head(batches: Sequence[_Padded], heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row of ``[T * heads, width]`` at each padded position, the rows of real tokens, and their positions.

    Padded positions are ordered by batch, segment, head and token.
    """
    rows, real, positions, start = [], [], [], 0
    for batch in batches:
        at = batch.tokens[:, None] * heads + np.arange(heads)[:, None]  # [B, heads, n]
        position = np.arange(start, start + at.size).reshape(at.shape)
        rows.append(at.ravel())
        real.append(at.swapaxes(1, 2)[batch.is_real].ravel())
        positions.append(position.swapaxes(1, 2)[batch.is_real].ravel())
        start += at.size
    of_all, of_real, padded = (torch.from_numpy(np.concatenate(arrays)) for arrays in (rows, real, positions))
    return of_all, of_real, padded
