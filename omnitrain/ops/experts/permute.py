"""Which expert gets which token: tokens to rows that are sorted by expert, and rows back to tokens.

Sizes: ``T`` tokens, ``k`` experts of each, ``S = T * k`` rows, ``E`` experts, ``H`` the hidden width. Nothing here
costs more with more experts but the ``[E]`` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """The (token, expert) pairs of a layer, sorted by expert.

    Attributes:
        token_of_row: ``[S]`` int64, the token of each row; those of one expert are ascending.
        row_of_slot: ``[T, k]`` int64, the row of each token's expert.
        ends: ``[E]`` int32, the end of each expert's rows.
    """

    token_of_row: Tensor
    row_of_slot: Tensor
    ends: Tensor

    @property
    def counts(self) -> Tensor:
        """``[E]`` int32: rows of each expert."""
        return counts_of(self.ends)


def counts_of(ends: Tensor) -> Tensor:
    """Lengths of runs that end at ``ends``, the first of which begins at 0."""
    return torch.diff(ends, prepend=ends.new_zeros(1))


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> TokenPermutation:
    """Sort the pairs of ``top_k_index`` ``[T, k]`` by expert, in order of their tokens within an expert.

    No value is read by the host.
    """
    num_slots = top_k_index.size(-1)
    # Few bits sort in few passes. A stable sort: what a row's neighbours are does not depend on the sort's mood.
    narrow = torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32
    experts, order = torch.sort(top_k_index.reshape(-1).to(narrow), stable=True)
    rows = torch.arange(order.numel(), device=order.device)
    row_of_slot = torch.empty_like(order).scatter_(0, order, rows)
    every_expert = torch.arange(num_experts, dtype=narrow, device=order.device)
    ends = torch.searchsorted(experts, every_expert, right=True, out_int32=True)
    return TokenPermutation(order // num_slots, row_of_slot.view(-1, num_slots), ends)


def take_rows(tokens: Tensor, routes: TokenPermutation) -> Tensor:
    """``tokens`` ``[T, H]`` -> rows ``[S, H]``, each token once per expert of its."""
    taken: Tensor = _TakeRows.apply(tokens, routes)
    return taken


def combine_rows(rows: Tensor, weights: Tensor, routes: TokenPermutation) -> Tensor:
    """``rows`` ``[S, H]`` -> ``[T, H]``: each token's rows times its ``weights`` ``[T, k]``, added.

    Products and sums are in the wider of both dtypes, or better; the result has the dtype of ``rows``.
    """
    combined: Tensor = _CombineRows.apply(rows, weights, routes)
    return combined


def token_gradients(gradient: Tensor, routes: TokenPermutation) -> Tensor:
    """Of :func:`take_rows`: the sum over a token's own ``k`` rows: a gather, where autograd would scatter."""
    return F.embedding_bag(routes.row_of_slot, gradient, mode="sum")


def weighted_sums(rows: Tensor, weights: Tensor, routes: TokenPermutation) -> Tensor:
    """:func:`combine_rows`; no ``[T, k, H]`` tensor where rows and weights have one dtype."""
    if rows.dtype == weights.dtype:
        return F.embedding_bag(routes.row_of_slot, rows, mode="sum", per_sample_weights=weights)
    per_slot = rows[routes.row_of_slot] * weights.unsqueeze(-1)
    return per_slot.sum(1).to(rows.dtype)


def weighted_sum_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor, routes: TokenPermutation
) -> tuple[Tensor, Tensor]:
    """Of :func:`combine_rows`: of ``rows`` and of ``weights``."""
    of_row = gradient.index_select(0, routes.token_of_row)
    products = torch.einsum("sh,sh->s", rows, of_row)
    weight_of_row = weights.new_empty(rows.size(0)).scatter_(0, routes.row_of_slot.view(-1), weights.reshape(-1))
    return of_row.mul_(weight_of_row.unsqueeze(-1)), products[routes.row_of_slot].to(weights.dtype)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routes: TokenPermutation) -> Tensor:
        ctx.routes = routes
        return tokens.index_select(0, routes.token_of_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return token_gradients(gradients[0], ctx.routes), None


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
