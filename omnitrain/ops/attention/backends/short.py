"""Causal attention over short segments on CPU: explicit scores, in few large calls.

Torch's kernel works through one segment and head after the other, with small products and much in between; for some
ten tokens that takes longer than to make all scores. And a row has one backward here, which gathers where autograd
would cut, fill up, scatter and put together batch by batch.

Shapes: ``H`` heads, ``K`` key heads, ``G = H / K``; ``T`` tokens; of a batch: ``B`` segments, ``L`` its longest length,
``Q`` queries of a segment (``L``, unless some are left out); ``D`` and ``E`` the widths of a query and of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ShortBatch:
    """Segments that share a product, filled up behind their ends.

    Attributes:
        length: ``L``.
        num_queries: ``B * K * G * Q``, places of queries.
        num_keys: ``B * K * L``, places of keys.
        hidden: ``[1 or B * K, G * Q, L]`` fp32, 0 where a query sees a key, else ``-inf``.
        is_real: ``[B * K, G * Q, 1]`` fp32, 0 at places that were filled up, else 1; None: there are none.
    """

    length: int
    num_queries: int
    num_keys: int
    hidden: torch.Tensor
    is_real: torch.Tensor | None


@dataclass(frozen=True)
class ShortRow:
    """The batches of a row, and where its tokens are in them. Rows of a head lie together, as products want them.

    Attributes:
        tokens: ``T``.
        batches: in order of the row.
        queries: of each place of a query, its row of ``[T * H, D]``.
        query_places: of each row that is asked for, its place.
        keys: of each place of a key, its row of ``[T * K, D]``.
        key_places: ``[T * K]``, the place of each of these rows.
        asked: which rows of ``[T * H, D]`` are asked for; None: all. The output of the others is zero.
    """

    tokens: int
    batches: tuple[ShortBatch, ...]
    queries: torch.Tensor
    query_places: torch.Tensor
    keys: torch.Tensor
    key_places: torch.Tensor
    asked: torch.Tensor | None


def short_row(
    groups: Sequence[Sequence[int]],
    heads: int,
    key_heads: int,
    read: torch.Tensor | None,
) -> ShortRow:
    """Lay out a row.

    Args:
        groups: lengths of the segments of each batch, in order of the row.
        heads: ``H``.
        key_heads: ``K``.
        read: ``[T]`` bool, the tokens whose output is asked for; None: all.
    """
    keys = _all_places(groups)
    queries = keys if read is None else [_places_of(places, read.numpy()) for places in keys]
    batches = [_batch(*pair, heads, key_heads) for pair in zip(queries, keys, strict=True)]
    query_rows, asked, query_places = _by_head(queries, heads)
    key_rows, _, key_places = _by_head(keys, key_heads)
    return ShortRow(
        tokens=sum(map(sum, groups)),
        batches=tuple(batches),
        queries=query_rows,
        query_places=query_places,
        keys=key_rows,
        key_places=key_places,
        asked=None if read is None else asked,
    )


def attend_short(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: ShortRow, scale: float
) -> torch.Tensor:
    """``[T, H, E]`` of ``query`` ``[T, H, D]``, ``key`` ``[T, K, D]`` and ``value`` ``[T, K, E]``, all fp32."""
    return _AttendShort.apply(query, key, value, row, scale)


class _AttendShort(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: ShortRow, scale: float
    ) -> torch.Tensor:
        q, k, v = _gathered(query, row.queries), _gathered(key, row.keys), _gathered(value, row.keys)
        outputs, kept = [], []
        for batch, q_NQD, k_NLD, v_NLE in _batches(row, q, k, v):
            scores = torch.baddbmm(batch.hidden, q_NQD, k_NLD.transpose(1, 2), alpha=scale)
            weights = scores.softmax(-1)
            if batch.is_real is not None:
                weights *= batch.is_real  # what was filled up has no output, and so no gradient
            outputs.append((weights @ v_NLE).flatten(0, 1))
            kept.append(weights)
        ctx.row, ctx.scale = row, scale
        ctx.save_for_backward(q, k, v, *kept)
        return _put_back(outputs, row.query_places, row.tokens, row.asked, query.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row: ShortRow = ctx.row
        q, k, v, *kept = ctx.saved_tensors
        of_queries: list[torch.Tensor] = []
        of_keys: list[torch.Tensor] = []
        of_values: list[torch.Tensor] = []
        grads = _gathered(grad, row.queries).split([batch.num_queries for batch in row.batches])
        for (_, q_NQD, k_NLD, v_NLE), weights, of_batch in zip(_batches(row, q, k, v), kept, grads, strict=True):
            g_NQE = of_batch.view(*weights.shape[:2], -1)
            of_weights = g_NQE @ v_NLE.transpose(1, 2)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(ctx.scale)
            of_queries.append((of_scores @ k_NLD).flatten(0, 1))
            of_keys.append((of_scores.transpose(1, 2) @ q_NQD).flatten(0, 1))
            of_values.append((weights.transpose(1, 2) @ g_NQE).flatten(0, 1))
        key_heads = len(row.key_places) // row.tokens
        return (
            _put_back(of_queries, row.query_places, row.tokens, row.asked, grad.size(1)),
            _put_back(of_keys, row.key_places, row.tokens, None, key_heads),
            _put_back(of_values, row.key_places, row.tokens, None, key_heads),
            None,
            None,
        )


def _batches(
    row: ShortRow, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[ShortBatch, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each batch with its ``[B * K, G * Q, D]``, ``[B * K, L, D]`` and ``[B * K, L, E]``."""
    num_queries, num_keys = ([getattr(b, name) for b in row.batches] for name in ("num_queries", "num_keys"))
    parts = (q.split(num_queries), k.split(num_keys), v.split(num_keys))
    for batch, *states in zip(row.batches, *parts, strict=True):
        number = batch.num_keys // batch.length
        q, k, v = (x.view(number, -1, x.size(-1)) for x in states)
        yield batch, q, k, v


def _gathered(x_THD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x_THD.flatten(0, 1).index_select(0, rows)


def _put_back(
    parts: list[torch.Tensor], places: torch.Tensor, tokens: int, rows: torch.Tensor | None, heads: int
) -> torch.Tensor:
    """``[T, heads, width]`` from what batches have at ``places``; ``rows``: whose it is, where it is not all."""
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    # No view: compiled code that takes it would depend on what it is a view of.
    out = (x.new_empty if rows is None else x.new_zeros)(tokens, heads, x.size(1))
    if rows is None:
        torch.index_select(x, 0, places, out=out.flatten(0, 1))
    else:
        out.flatten(0, 1).index_copy_(0, rows, x.index_select(0, places))
    return out


@dataclass(frozen=True)
class _Places:
    """Places of a batch: the token at each, ``[B, n]``, its position in its segment, and whether it is not a filler.

    Made in numpy: for a handful of numbers a call of torch takes longer than its work.
    """

    tokens: np.ndarray
    positions: np.ndarray
    is_real: np.ndarray

    def taken(self, order: np.ndarray, is_real: np.ndarray) -> _Places:
        """Other places, by their index ``[B, m]``."""
        return _Places(*(np.take_along_axis(x, order, axis=1) for x in (self.tokens, self.positions, is_real)))


def _all_places(groups: Sequence[Sequence[int]]) -> list[_Places]:
    made, start = [], 0
    for lengths in groups:
        sizes = np.array(lengths)[:, None]
        starts, place = start + sizes.cumsum(0) - sizes, np.arange(max(lengths))[None].repeat(len(lengths), 0)
        # Behind its end a segment repeats its last token, which nobody attends to.
        made.append(_Places(starts + np.minimum(place, sizes - 1), place, place < sizes))
        start += sum(lengths)
    return made


def _places_of(places: _Places, read: np.ndarray) -> _Places:
    """Those of tokens that are read, and fillers up to the most of a segment."""
    is_read = read[places.tokens] & places.is_real
    most = max(int(is_read.sum(1).max()), 1)
    return places.taken((~is_read).argsort(axis=1, kind="stable")[:, :most], is_read)


def _batch(queries: _Places, keys: _Places, heads: int, key_heads: int) -> ShortBatch:
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


def _by_head(batches: Sequence[_Places], heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each place (by batch, segment, head) its row of ``[T * heads, width]``; rows that are real; their places."""
    rows, real, places, start = [], [], [], 0
    for batch in batches:
        at = batch.tokens[:, None] * heads + np.arange(heads)[:, None]  # [B, heads, n]
        place = np.arange(start, start + at.size).reshape(at.shape)
        rows.append(at.ravel())
        real.append(at.swapaxes(1, 2)[batch.is_real].ravel())
        places.append(place.swapaxes(1, 2)[batch.is_real].ravel())
        start += at.size
    found_rows, found_real, found_places = (torch.from_numpy(np.concatenate(own)) for own in (rows, real, places))
    return found_rows, found_real, found_places
