"""Differentiable collectives: the backward of each is its transpose.

Each rank has its loss, and gradients are derivatives of the sum of all ranks' losses. A rank's gradient of a replicated
tensor is therefore a partial gradient; the sum over all ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from omnitrain import torch_private

T = TypeVar("T")

_BUCKET_BYTES = 2**26  # per collective


def add_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the tensors of all ranks (all-reduce). The backward sums the gradients in the same way."""
    summed = partial(_summed, group=group)
    return with_backward(summed, summed, tensor)


def add_up_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor``, equal on all ranks and used by each; the backward sums its gradients over the ranks."""
    return with_backward(lambda local: local.view_as(local), partial(_summed, group=group), tensor)


def gather_columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along the last dim: ``[..., n]`` of each rank -> ``[..., ranks * n]``."""

    def gather(own: Tensor) -> Tensor:
        return gathered(own, group).movedim(0, -2).flatten(-2)

    def sum_columns(whole: Tensor) -> Tensor:
        parts = whole.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
        own = torch.empty_like(parts[0])
        torch_private.reduce_scatter_single(own.view(-1), parts.view(-1), group=group)
        return own

    return with_backward(gather, sum_columns, tensor)


def own_columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's columns ``[..., n]``, the inverse of :func:`gather_columns`; without any collective."""
    width = tensor.size(-1) // group.size()
    return tensor.narrow(-1, group.rank() * width, width)


def gather_rows(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-gather rows ``[counts of this rank, ...]``, rank by rank: ``[sum of counts, ...]``.

    The backward sums a row's gradients on its rank. All ranks of ``group`` must call this, forward and backward.
    """
    gather = partial(_gathered_rows, counts=counts, group=group)
    return with_backward(gather, partial(_summed_rows, counts=counts, group=group), own)


def scatter_rows(whole: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter rows: the transpose of :func:`gather_rows`; ``[counts of this rank, ...]``, summed in fp32."""
    gather = partial(_gathered_rows, counts=counts, group=group)
    return with_backward(partial(_summed_rows, counts=counts, group=group), gather, whole)


def gathered_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All-gather objects by pickle, rank by rank; ``group`` None: all ranks."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, own, group=group)
    return objects


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``[...]`` of each rank to ``[ranks, ...]``, without autograd."""
    parts = tensor.new_empty(group.size(), *tensor.shape)
    torch_private.all_gather_single(parts.view(-1), tensor.reshape(-1), group=group)
    return parts


@torch.no_grad()
def all_reduce_in_buckets(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors (of DTensors, this rank's shards) in place, many at once, in one order on all ranks."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        by_kind.setdefault((local.dtype, local.device), []).append(local)
    for of_kind in by_kind.values():
        for bucket in _buckets(of_kind):
            flat = torch_private.flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=group)
            torch_private.copy_each(bucket, list(torch_private.unflatten_dense_tensors(flat, bucket)))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def with_backward(forth: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
    """Return ``forth(*tensors)`` with the backward ``back``, which cannot be differentiated again.

    ``forth`` returns a tensor or a tuple of tensors; ``back`` gets a gradient for each, and returns one for each of
    ``tensors``. What ``back`` needs of tensors with gradients must not come from its closure, which would keep them.
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
        results = ctx.back(*gradients)
        return None, None, *(results if isinstance(results, tuple) else (results,))


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
    """Sum into a new tensor: autograd may use the gradient for other inputs, too."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
