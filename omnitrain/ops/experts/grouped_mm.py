"""The reference backend: grouped matmuls of all experts over rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from omnitrain.ops.experts.lora import ExpertAdapter
from omnitrain.ops.experts.permute import counts_of
from omnitrain.ops.experts.weights import DelayedByRange, ExpertRange, ExpertWeights

Before = Callable[[Tensor], Tensor]

_ALIGNMENT = 16  # bytes
_FIRST_THAT_LEAVES = 10  # major compute capability of Blackwell; Hopper writes zeros


@dataclass(frozen=True)
class ProductMemory:
    """The tensors that the matmuls save for the backward."""

    # the most rows to compute at once; more rows are split, and the backward recomputes each part from its input. None:
    # no limit
    row_budget: int | None = None
    recomputes_activation: bool = False  # the backward recomputes the activation between both matmuls


def grouped_experts(experts: ExpertWeights, rows: Tensor, ends: Tensor, memory: ProductMemory) -> Tensor:
    """Compute the results ``[S, H]`` of this rank's experts for ``rows`` ``[S, H]``, of each one up to its ``ends``."""
    budget, again = memory.row_budget, memory.recomputes_activation
    if budget is None or rows.size(0) <= budget:
        return experts.finish(_products(experts, rows, ends, again)).to(rows.dtype)
    offsets = [*range(0, rows.size(0), budget), rows.size(0)]
    chunks = [
        checkpoint(
            _products,
            experts.without_delay(),  # delayed gradients would keep the operands of all rows
            rows[start:stop],
            (ends - start).clamp(0, stop - start),
            again,
            use_reentrant=False,
        )
        for start, stop in pairwise(offsets)
    ]
    return experts.finish(torch.cat(chunks)).to(rows.dtype)


def _products(experts: ExpertWeights, rows: Tensor, ends: Tensor, activates_again: bool) -> Tensor:
    linear = partial(grouped_linear, ends=ends, transposed=experts.is_transposed)
    inner = linear(rows, experts.first, experts.first_bias, later=experts.first_later)
    inner = _adapted(inner, rows, experts.first_adapter, ends)
    # What comes before a product is computed again with it.
    active, before = (inner, experts.activate) if activates_again else (experts.activate(inner), None)
    outer = linear(active, experts.down, experts.down_bias, later=experts.down_later, before=before)
    return _adapted(outer, active, experts.down_adapter, ends, before)


def _adapted(
    product: Tensor, rows: Tensor, adapter: ExpertAdapter | None, ends: Tensor, before: Before | None = None
) -> Tensor:
    """Add the product of ``rows`` and an adapter to the ``product`` of frozen matrices, in the wider dtype."""
    if adapter is None:
        return product
    thin = grouped_linear(rows, adapter.a, None, ends, transposed=False, before=before)
    delta = grouped_linear(thin, adapter.b, None, ends, transposed=False)
    return (product + adapter.scale * delta).to(product.dtype)


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    *,
    transposed: bool,
    later: DelayedByRange | None = None,
    before: Before | None = None,
) -> Tensor:
    """Multiply each row ``[S, in]``, sorted by expert, by its expert's matrix, and add the expert's bias: ``[S, out]``.

    ``weight`` is ``[E, out, in]``, ``transposed`` ``[E, in, out]``; rows are cast to its dtype. ``bias`` is ``[E,
    out]``, ``ends`` ``[E]`` int32. ``later`` takes the gradient of ``weight`` in the backward, range by range; the
    backward then returns none. ``before`` computes ``[S, in]`` from rows of any width, without parameters; the backward
    recomputes it.
    """
    product: Tensor = _GroupedProduct.apply(rows, weight, ends, transposed, later, before)
    return product if bias is None else _AddBias.apply(product, bias, ends)


class _GroupedProduct(torch.autograd.Function):
    """A grouped matmul with the gradients of autograd; the backward may recompute its input and delay ``dW``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        transposed: bool,
        later: DelayedByRange | None,
        before: Before | None,
    ) -> Tensor:
        factor = (rows if before is None else before(rows)).to(weight.dtype)
        ctx.save_for_backward(factor if before is None else rows, weight, ends)
        ctx.dtype, ctx.transposed, ctx.later, ctx.before = rows.dtype, transposed, later, before
        return _of_rows(factor, weight if transposed else weight.transpose(-2, -1), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        saved, weight, ends = ctx.saved_tensors
        rows = factor = saved
        if ctx.before is not None:
            with torch.enable_grad():
                rows = saved.detach().requires_grad_()
                factor = ctx.before(rows).to(weight.dtype)
        gradient = gradient.contiguous()  # grouped_mm takes no other
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = _of_rows(gradient, weight.transpose(-2, -1) if ctx.transposed else weight, ends)
            if ctx.before is not None:
                (of_rows,) = torch.autograd.grad(factor, rows, of_rows)
        if ctx.needs_input_grad[1]:
            factor = factor.detach()
            left, right = (factor, gradient) if ctx.transposed else (gradient, factor)
            if ctx.later is None:
                of_weight = _of_experts(left, right, ends)
            else:
                ctx.later(partial(_of_range, left, right, ends))
        return None if of_rows is None else of_rows.to(ctx.dtype), of_weight, None, None, None, None


def _of_rows(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``[S, in]`` times each row's matrix of ``[E, in, out]`` -> ``[S, out]``."""
    if rows.size(0) == 0:  # not all of torch's kernels take none
        return rows.new_empty(0, matrices.size(2))
    width, missing_in, missing_out = matrices.size(2), _missing(matrices, 1), _missing(matrices, 2)
    if missing_in or missing_out:
        matrices = F.pad(matrices, (0, missing_out, 0, missing_in))
        rows = F.pad(rows, (0, missing_in))
    return F.grouped_mm(rows, matrices, offs=ends)[:, :width]


def _of_experts(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """``[S, M]`` and ``[S, N]`` -> ``[E, M, N]``: sums of outer products over each expert's rows."""
    height, width = left.size(1), right.size(1)
    if left.size(0) == 0:
        return left.new_zeros(len(ends), height, width)
    left, right = (F.pad(rows, (0, _missing(rows, 1))) if _missing(rows, 1) else rows for rows in (left, right))
    sums = F.grouped_mm(left.t(), right, offs=ends)
    if _leaves_empty_sums(left.device):
        sums.masked_fill_((counts_of(ends) == 0).view(-1, 1, 1), 0)
    return sums[:, :height, :width]


@cache
def _leaves_empty_sums(device: torch.device) -> bool:
    """Whether torch's kernel leaves memory uninitialized for experts without rows (pytorch#172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _FIRST_THAT_LEAVES


def _of_range(left: Tensor, right: Tensor, ends: Tensor, span: ExpertRange) -> Tensor:
    """:func:`_of_experts` for some of the experts: each one's product is the same."""
    rows = slice(span.first_row, span.end_row)
    return _of_experts(left[rows], right[rows], ends[span.start : span.stop] - span.first_row)


def _missing(tensor: Tensor, dim: int) -> int:
    """The padding of a width for grouped matmuls: torch has kernels only for multiples of 16 bytes."""
    return -tensor.size(dim) % (_ALIGNMENT // tensor.element_size())


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
