"""The reference: both products of all experts as grouped matrix products over rows that are sorted by expert."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from omnitrain.ops.experts.declared import ExpertWeights
from omnitrain.ops.experts.lora import ExpertAdapter, aligned
from omnitrain.ops.weight_gradients import Later


def grouped_experts(experts: ExpertWeights, rows: Tensor, ends: Tensor, budget: int | None = None) -> Tensor:
    """The experts' results for rows that are sorted by expert.

    Args:
        experts: that are here, ``E`` of them.
        rows: ``[S, H]``.
        ends: ``[E]`` int32: the end of each expert's rows; the last one is ``S``.
        budget: rows that are computed at a time; of more, only inputs and results wait for the backward, which
            computes the rest again. None: all at once.

    Returns:
        ``[S, H]`` in the dtype of ``rows``. Experts without rows have a gradient, of zeros.
    """
    if budget is None or rows.size(0) <= budget:
        return experts.finish(_products(experts, rows, ends)).to(rows.dtype)
    borders = [*range(0, rows.size(0), budget), rows.size(0)]
    chunks = [
        checkpoint(_products, experts, rows[start:stop], (ends - start).clamp(0, stop - start), use_reentrant=False)
        for start, stop in pairwise(borders)
    ]
    return experts.finish(torch.cat(chunks)).to(rows.dtype)


def _products(experts: ExpertWeights, rows: Tensor, ends: Tensor) -> Tensor:
    transposed: bool = experts.is_transposed
    inner = grouped_linear(
        rows, experts.first, experts.first_bias, ends, transposed=transposed, later=experts.first_later
    )
    active = experts.activate(_adapted(inner, rows, experts.first_adapter, ends))
    outer = grouped_linear(
        active, experts.down, experts.down_bias, ends, transposed=transposed, later=experts.down_later
    )
    return _adapted(outer, active, experts.down_adapter, ends)


def _adapted(product: Tensor, rows: Tensor, adapter: ExpertAdapter | None, ends: Tensor) -> Tensor:
    """``product`` of ``rows`` and frozen matrices, with what is trained beside them; added in the wider dtype."""
    if adapter is None:
        return product
    own = aligned(adapter)
    thin = grouped_linear(rows, own.a, None, ends, transposed=False)
    delta = grouped_linear(thin, own.b, None, ends, transposed=False)
    return (product + own.scale * delta).to(product.dtype)


def grouped_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, *, transposed: bool, later: Later | None = None
) -> Tensor:
    """Each row times its expert's matrix, plus its expert's bias.

    Args:
        rows: ``[S, in]``, sorted by expert.
        weight: ``[E, out, in]``; ``transposed``: ``[E, in, out]``. Rows are cast to its dtype.
        bias: ``[E, out]`` or None.
        ends: ``[E]`` int32, the last one ``S``.
        transposed: see ``weight``.
        later: takes the gradient of ``weight`` in the backward, which then returns none.

    Returns:
        ``[S, out]``.
    """
    product: Tensor = _GroupedProduct.apply(rows.to(weight.dtype), weight, ends, transposed, later)
    return product if bias is None else _AddBias.apply(product, bias, ends)


class _GroupedProduct(torch.autograd.Function):
    """As autograd differentiates ``grouped_mm``, but for when the gradient of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, later: Later | None) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.transposed, ctx.later = transposed, later
        return F.grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()  # grouped_mm takes no other
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, weight.transpose(-2, -1) if ctx.transposed else weight, offs=ends)
        if ctx.needs_input_grad[1]:
            left, right = (rows, gradient) if ctx.transposed else (gradient, rows)
            make = partial(F.grouped_mm, left.t(), right, offs=ends)
            of_weight = make() if ctx.later is None else ctx.later(make)
        return of_rows, of_weight, None, None, None


class _AddBias(torch.autograd.Function):
    """The gradient of a bias is the sum over the rows of its expert: over runs, where autograd would scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        number = torch.arange(rows.size(0), dtype=ends.dtype, device=rows.device)
        return rows + bias.index_select(0, torch.searchsorted(ends, number, right=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (ends,) = gradients, ctx.saved_tensors
        starts = F.pad(ends[:-1], (1, 0)).long()
        number = torch.arange(gradient.size(0), device=gradient.device)
        return gradient, F.embedding_bag(number, gradient, starts, mode="sum"), None
