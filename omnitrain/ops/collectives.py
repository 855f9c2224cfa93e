"""Differentiable collectives of ranks that compute together: the backward of each is its transpose.

Each rank's loss is its own, and what is differentiated is the sum of all ranks' losses. So the gradient that a rank has
of something that several hold alike is its own part, and the parts of all of them add up to the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

T = TypeVar("T")

# torch 2.13 has other names for them.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def add_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors, on each of them. Gradients are added up in the same way."""
    return _AddUp.apply(tensor, group)


def add_up_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``tensor``, which all ranks computed alike by helping each other: its gradients are added up.

    For a function with collectives inside, whose backward on each rank takes the gradient of what all ranks return.
    """
    return _AddUpGradients.apply(tensor, group)


def gather_columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[..., n]`` of each rank side by side: ``[..., ranks * n]``, on each of them."""
    return _GatherColumns.apply(tensor, group)


def own_columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`gather_columns`: ``[..., n]`` of this rank. No collective, neither forth nor back."""
    width = tensor.size(-1) // group.size()
    return tensor.narrow(-1, group.rank() * width, width)


def gather_rows(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, rank by rank: ``[sum of counts, ...]``, on each. A row's gradients add up at its owner.

    Args:
        own: ``[counts of this rank, ...]``.
        counts: rows of each rank.
        group: all of its ranks call this, forward and backward.
    """
    rows: Tensor = _GatherRows.apply(own, list(counts), group)
    return rows


def scatter_rows(whole: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum of all ranks' tensors: the transpose of :func:`gather_rows`, with the same arguments.

    Returns:
        ``[counts of this rank, ...]``, added up in fp32.
    """
    rows: Tensor = _ScatterRows.apply(whole, list(counts), group)
    return rows


def gathered_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank of the group has, rank by rank, pickled on its way; None: of all ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, own, group=group)
    return everywhere


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[ranks, ...]`` of each rank's ``[...]``; without a graph."""
    parts = tensor.new_empty(group.size(), *tensor.shape)
    _all_gather(parts.view(-1), tensor.reshape(-1), group=group)
    return parts


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _AddUpGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(tensor, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.unflatten(-1, (ctx.group.size(), -1)).movedim(-2, 0).contiguous()
        own = torch.empty_like(parts[0])
        _reduce_scatter(own.view(-1), parts.view(-1), group=ctx.group)
        return own, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _gathered_rows(own, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed_rows(gradient, ctx.counts, ctx.group), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _summed_rows(whole, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered_rows(gradient, ctx.counts, ctx.group), None, None


def _gathered_rows(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    return torch.cat([rows[:count] for rows, count in zip(gathered(padded, group), counts, strict=True)])


def _summed_rows(whole: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    ranks, own = len(counts), counts[group.rank()]
    parts = whole.new_empty(ranks * own, *whole.shape[1:])
    dist.all_to_all_single(parts, whole.contiguous(), [own] * ranks, counts, group=group)
    wide = torch.promote_types(whole.dtype, torch.float32)
    return parts.view(ranks, own, *whole.shape[1:]).sum(0, dtype=wide).to(whole.dtype)


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A new tensor: a gradient may be that of other inputs, too."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
