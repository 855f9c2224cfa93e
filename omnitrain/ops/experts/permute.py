"""Permute tokens to rows sorted by expert, and rows back to tokens.

Sizes: ``T`` tokens, ``k`` experts per token, ``S = T * k`` rows, ``E`` experts, ``H`` hidden width. Only the ``[E]``
counts cost more with more experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omnitrain.ops.collectives import with_backward


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """The (token, expert) pairs of a layer, sorted by expert."""

    token_of_row: Tensor  # [S] int64, the token of each row; tokens of one expert are ascending
    row_of_slot: Tensor  # [T, k] int64, the row of each token's expert
    ends: Tensor  # [E] int32, the end of each expert's rows

    @property
    def counts(self) -> Tensor:
        """``[E]`` int32: rows of each expert."""
        return counts_of(self.ends)


def counts_of(ends: Tensor) -> Tensor:
    """Return the lengths of consecutive runs that end at ``ends``; the first starts at 0."""
    return torch.diff(ends, prepend=ends.new_zeros(1))


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> TokenPermutation:
    """Sort the pairs of ``top_k_index`` ``[T, k]`` by expert, then by token; the host reads no value."""
    num_slots = top_k_index.size(-1)
    # Few bits sort in few passes. The sort is stable, so the order of rows is deterministic.
    narrow = torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32
    experts, order = torch.sort(top_k_index.reshape(-1).to(narrow), stable=True)
    rows = torch.arange(order.numel(), device=order.device)
    row_of_slot = torch.empty_like(order).scatter_(0, order, rows)
    every_expert = torch.arange(num_experts, dtype=narrow, device=order.device)
    ends = torch.searchsorted(experts, every_expert, right=True, out_int32=True)
    return TokenPermutation(order // num_slots, row_of_slot.view(-1, num_slots), ends)


def take_rows(tokens: Tensor, routes: TokenPermutation) -> Tensor:
    """Permute ``tokens`` ``[T, H]`` to rows ``[S, H]``, each token once per chosen expert."""
    taken: Tensor = with_backward(
        lambda tokens: tokens.index_select(0, routes.token_of_row), lambda grad: token_gradients(grad, routes), tokens
    )
    return taken


def combine_rows(rows: Tensor, weights: Tensor, routes: TokenPermutation) -> Tensor:
    """Sum each token's ``rows`` ``[S, H]`` weighted by ``weights`` ``[T, k]``, in the wider dtype -> ``[T, H]``."""
    combined: Tensor = _CombineRows.apply(rows, weights, routes)
    return combined


def token_gradients(gradient: Tensor, routes: TokenPermutation) -> Tensor:
    """Return the gradient of :func:`take_rows`: the sum of a token's ``k`` rows, as a gather instead of a scatter."""
    return F.embedding_bag(routes.row_of_slot, gradient, mode="sum")


def weighted_sums(rows: Tensor, weights: Tensor, routes: TokenPermutation) -> Tensor:
    """Compute :func:`combine_rows`, without a ``[T, k, H]`` tensor if rows and weights have the same dtype."""
    if rows.dtype == weights.dtype:
        return F.embedding_bag(routes.row_of_slot, rows, mode="sum", per_sample_weights=weights)
    per_slot = rows[routes.row_of_slot] * weights.unsqueeze(-1)
    return per_slot.sum(1).to(rows.dtype)


def weighted_sum_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor, routes: TokenPermutation
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`combine_rows` for ``rows`` and ``weights``."""
    of_row = gradient.index_select(0, routes.token_of_row)
    products = torch.einsum("sh,sh->s", rows, of_row)
    weight_of_row = weights.new_empty(rows.size(0)).scatter_(0, routes.row_of_slot.view(-1), weights.reshape(-1))
    return of_row.mul_(weight_of_row.unsqueeze(-1)), products[routes.row_of_slot].to(weights.dtype)


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, routes: TokenPermutation) -> Tensor:
        ctx.routes = routes
        ctx.save_for_backward(rows, weights)
        return weighted_sums(rows, weights, routes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        return *weighted_sum_gradients(gradients[0], rows, weights, ctx.routes), None
