"""The ragged exchange: send rows of items from the ranks that make them to the ranks that need them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.host_values import to_device
from omnitrain.parallel.step.feature_routing import row_splits
from omnitrain.plan import RowRoutes


class Exchange:
    """An all-to-all of the rows of items, and of their gradients back.

    Every rank of the group calls both methods with any number of tensors, ``[rows of all items that it makes, ...]``
    (:meth:`send_back`: that it needs), and gets equally many, ``[rows of all items that it needs, ...]``
    (:meth:`send_back`: that it makes). All tensors share one collective, whatever their dtypes. A rank without items
    passes tensors of zero rows, with the dtypes and other dims of the other ranks.

    Args:
        routes: routes by global rank, the same on all ranks. A consumer gets its items in the order of its entries.
        group: process group; None: all ranks. Entries between other ranks are ignored.
        made: items that this rank makes, in the order of their rows in its tensors; None: ascending.
    """

    def __init__(
        self, routes: RowRoutes, group: dist.ProcessGroup | None = None, *, made: Sequence[int] | None = None
    ) -> None:
        self.group = group
        self._rank = dist.get_rank()
        self._splits = splits = row_splits(routes, dist.get_process_group_ranks(group), self._rank, made)
        self._made, self._needed = torch.from_numpy(splits.made), torch.from_numpy(splits.needed)

    def send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Send the rows that this rank makes; return those that it needs, without a graph.

        Args:
            tensors: ``[rows of the items that this rank makes, ...]``, any dtypes, on one device; at least one.

        Raises:
            ValueError: a tensor has another number of rows than the items that this rank makes.
        """
        splits = self._splits
        for tensor in tensors:
            if len(tensor) != (number := splits.num_rows_made):
                raise ValueError(
                    f"rank {self._rank}: found {len(tensor)} rows; expected {number}, one per row of its items"
                )
        made, needed = self._indices_on(tensors[0].device)
        rows = _packed([tensor.detach()[made] for tensor in tensors])
        received = self._all_to_all(rows, splits.sent, splits.received)
        in_order = torch.empty_like(received)
        in_order[needed] = received
        return tuple(_unpacked(in_order, tensors))

    def send_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients to the ranks that made the rows, which add up those of several consumers.

        The sum is the gradient: consumers see different samples, or different slices of the sequence, and each tensor
        parallel rank has a partial gradient.

        Args:
            gradients: ``[rows of the items that this rank needs, ...]``, of the floating-point tensors alone.
        """
        splits = self._splits
        made, needed = self._indices_on(gradients[0].device)
        received = self._all_to_all(_packed([gradient[needed] for gradient in gradients]), splits.received, splits.sent)
        return [self._summed(rows, made, splits.parts) for rows in _unpacked(received, gradients)]

    def _indices_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        self._made, self._needed = to_device(self._made, device), to_device(self._needed, device)
        return self._made, self._needed

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self._splits.is_local:
            return rows
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        return out

    def _summed(self, rows: Tensor, made: Tensor, parts: list[int]) -> Tensor:
        """``[rows made, ...]``; gradients of the same row are summed in fp32, always in the same order."""
        dtype = torch.promote_types(rows.dtype, torch.float32) if len(parts) > 1 else rows.dtype
        total = rows.new_zeros(self._splits.num_rows_made, *rows.shape[1:], dtype=dtype)
        for of_consumer, index in zip(rows.split(parts), made.split(parts), strict=True):
            total[index] += of_consumer
        return total.to(rows.dtype)


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
