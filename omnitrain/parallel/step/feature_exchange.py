"""The ragged exchange: send rows of items from the ranks that make them to the ranks that need them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnitrain.ops.device import to_device
from omnitrain.parallel.step.feature_routing import RowSplits, rank_routing
from omnitrain.plan import RowRoutes


class Exchange:
    """A differentiable all-to-all of items: ``outputs = exchange(*tensors)``.

    Every rank of the group calls it with any number of tensors, ``[rows of all items that it makes, ...]``, and gets
    equally many, ``[rows of all items that it needs, ...]``. All tensors share one collective, whatever their dtypes.
    A rank without items passes tensors of zero rows, with the dtypes and other dims of the other ranks.

    The backward is the transpose: gradients return to the producer, which sums those of several consumers. The sum is
    the gradient: consumers see different samples, or different slices of the sequence, and each tensor parallel rank
    has a partial gradient. The backward is a collective on all ranks, also on ranks whose inputs have no graph. So the
    loss of every rank must depend on at least one output, even on outputs of zero rows (``outputs[0].sum() * 0`` is
    enough).

    Args:
        routes: routes by global rank, the same on all ranks. A consumer gets its items in the order of its entries.
        group: process group; None: all ranks. Entries between other ranks are ignored.
        made: items that this rank makes, in the order of their rows in its tensors; None: ascending.
        is_differentiable: False: outputs have no graph, and there is no backward, because no weight before the
            exchange trains. The same on all ranks.

    Attributes:
        around_backward: makes a context for the backward, such as a span of a recording.

    Raises:
        ValueError: the routes contradict themselves or ``made``.
    """

    def __init__(
        self,
        routes: RowRoutes,
        group: dist.ProcessGroup | None = None,
        *,
        made: Sequence[int] | None = None,
        is_differentiable: bool = True,
    ) -> None:
        self.group = group
        self.is_differentiable = is_differentiable
        self.around_backward: Callable[[], AbstractContextManager[None]] = nullcontext
        self._rank = dist.get_rank()
        routing = rank_routing(routes, dist.get_process_group_ranks(group), self._rank, made)
        self.is_local = routing.is_local
        self.num_rows_made = routing.num_rows_made
        self._splits = _DeviceSplits(routing.splits)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange the rows.

        Args:
            tensors: ``[rows of the items that this rank makes, ...]``, any dtypes, on one device.

        Returns:
            For each tensor ``[rows of the items that this rank needs, ...]``. With gradients enabled, floating-point
            outputs have a graph on every rank.

        Raises:
            ValueError: a tensor has another number of rows than the items that this rank makes.
        """
        for tensor in tensors:
            if len(tensor) != self.num_rows_made:
                raise ValueError(
                    f"rank {self._rank}: found {len(tensor)} rows; expected {self.num_rows_made}, one per row of its "
                    "items"
                )
        if not tensors:
            return ()
        if not self.is_differentiable:
            return self._move([tensor.detach() for tensor in tensors])
        anchor = torch.zeros((), requires_grad=True)  # forces a backward even if no tensor has a graph
        return _Move.apply(self, anchor, *tensors)

    def _move(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        splits = self._splits
        made, needed = splits.indices_on(tensors[0].device)
        received = self._all_to_all(_packed([tensor[made] for tensor in tensors]), splits.sent, splits.received)
        in_order = torch.empty_like(received)
        in_order[needed] = received
        return tuple(_unpacked(in_order, tensors))

    def _move_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        splits = self._splits
        made, needed = splits.indices_on(gradients[0].device)
        received = self._all_to_all(_packed([gradient[needed] for gradient in gradients]), splits.received, splits.sent)
        return [self._summed(rows, made, splits.parts) for rows in _unpacked(received, gradients)]

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self.is_local:
            return rows
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        return out

    def _summed(self, rows: Tensor, made: Tensor, parts: list[int]) -> Tensor:
        """``[rows made, ...]``; gradients of the same row are summed in fp32, always in the same order."""
        dtype = torch.promote_types(rows.dtype, torch.float32) if len(parts) > 1 else rows.dtype
        total = rows.new_zeros(self.num_rows_made, *rows.shape[1:], dtype=dtype)
        for of_consumer, index in zip(rows.split(parts), made.split(parts), strict=True):
            total[index] += of_consumer
        return total.to(rows.dtype)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.is_floating = [tensor.is_floating_point() for tensor in tensors]
        outputs = exchange._move(tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        floating = [index for index, is_floating in enumerate(ctx.is_floating) if is_floating]
        of_inputs: list[Tensor | None] = [None] * len(gradients)
        with ctx.exchange.around_backward():
            moved = ctx.exchange._move_back([gradients[i] for i in floating])
        for index, gradient in zip(floating, moved, strict=True):
            of_inputs[index] = gradient
        return None, None, *of_inputs


class _DeviceSplits:
    """:class:`RowSplits` with the indices as tensors."""

    def __init__(self, splits: RowSplits) -> None:
        self.sent, self.received, self.parts = splits.sent, splits.received, splits.parts
        self._made, self._needed = torch.from_numpy(splits.made), torch.from_numpy(splits.needed)

    def indices_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        self._made, self._needed = to_device(self._made, device), to_device(self._needed, device)
        return self._made, self._needed


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """``[rows, bytes of all tensors]`` uint8."""
    columns = [tensor.reshape(len(tensor), _row_size(tensor)).contiguous().view(torch.uint8) for tensor in tensors]
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _unpacked(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split ``[rows, bytes]`` into tensors with the dtypes and row shapes of ``like``."""
    columns = rows.split([_row_size(tensor) * tensor.element_size() for tensor in like], dim=1)
    # Always copy: a column can be contiguous (one row) and start at an unaligned address.
    flat = (
        [column.clone(memory_format=torch.contiguous_format).view(-1) for column in columns]
        if len(columns) > 1
        else [rows.view(-1)]
    )
    return [data.view(tensor.dtype).view(len(rows), *tensor.shape[1:]) for data, tensor in zip(flat, like, strict=True)]


def _row_size(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])
