"""Differentiable collectives of ranks that compute together: the backward of each is its transpose.

Each rank's loss is its own, and what is differentiated is the sum of all ranks' losses. So the gradient that a rank has
of something that several hold alike is its own part, and the parts of all of them add up to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    summed = partial(_summed, group=group)
    return with_backward(summed, summed, tensor)


def add_up_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``tensor``, which all ranks computed alike by helping each other: its gradients are added up.

    For a function with collectives inside, whose backward on each rank takes the gradient of what all ranks return.
    """
    return with_backward(lambda own: own.view_as(own), partial(_summed, group=group), tensor)


def gather_columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[..., n]`` of each rank side by side: ``[..., ranks * n]``, on each of them."""
    return with_backward(partial(_gathered_columns, group=group), partial(_summed_columns, group=group), tensor)


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
    gather = partial(_gathered_rows, counts=counts, group=group)
    return with_backward(gather, partial(_summed_rows, counts=counts, group=group), own)


def scatter_rows(whole: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum of all ranks' tensors: the transpose of :func:`gather_rows`, with the same arguments.

    Returns:
        ``[counts of this rank, ...]``, added up in fp32.
    """
    gather = partial(_gathered_rows, counts=counts, group=group)
    return with_backward(partial(_summed_rows, counts=counts, group=group), gather, whole)


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


def with_backward(forth: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
    """``forth(*tensors)``, with a backward of its own: ``back`` of the gradients of what it returns.

    Args:
        forth: tensors of any shape -> a tensor, or a tuple of them.
        back: a gradient for each of those -> one for each of ``tensors``, of its shape. It is not differentiated.
        tensors: what is differentiated; all else is in the functions.
    """
    return _BothWays.apply(forth, back, *tensors)


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forth: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.back = back
        return forth(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.back(*gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def _gathered_columns(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    return gathered(own, group).movedim(0, -2).flatten(-2)


def _summed_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = whole.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own.view(-1), parts.view(-1), group=group)
    return own


def _gathered_rows(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    return torch.cat([rows[:count] for rows, count in zip(gathered(padded, group), counts, strict=True)])


def _summed_rows(whole: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    ranks, own = len(counts), counts[group.rank()]
    parts = whole.new_empty(ranks * own, *whole.shape[1:])
    dist.all_to_all_single(parts, whole.contiguous(), [own] * ranks, list(counts), group=group)
    wide = torch.promote_types(whole.dtype, torch.float32)
    return parts.view(ranks, own, *whole.shape[1:]).sum(0, dtype=wide).to(whole.dtype)


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A new tensor: a gradient may be that of other inputs, too."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
