"""This rank's part of a packed row that the ranks of a sequence group share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnitrain.models.part import fewest_tokens
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.ulysses import UlyssesShard
from omnitrain.plan.sequence import SequenceSplit, split_sequence


def part_of(state: ParallelState, num_tokens: int, device: torch.device) -> SequencePart | None:
    """What this rank has of a row; None: all of it.

    Args:
        state: of the foundation.
        num_tokens: of the row; one that is too short for its ranks will be filled up.
        device: of the row.
    """
    ranks = state.size("sequence")
    if ranks == 1:
        return None
    split = split_sequence(max(num_tokens, fewest_tokens(ranks)), sp=state.size("sp"), cp=state.size("cp"))
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    return SequencePart(split, state.place("sequence"), shard, state.sequence_group, device)


@dataclass(frozen=True, eq=False)
class SequencePart:
    """A :class:`~omnitrain.ops.attention.RowPart` of a row that ``split`` deals to the ranks of ``group``.

    Attributes:
        split: of the row.
        place: of this rank in ``group``.
        attention: over the row.
        group: ranks that share it.
        device: of the row.
    """

    split: SequenceSplit
    place: int
    attention: UlyssesShard
    group: dist.ProcessGroup
    device: torch.device

    @cached_property
    def rows(self) -> Tensor:
        """``[t]`` int64, ascending: this rank's tokens."""
        return torch.from_numpy(self.split.rows[self.place]).to(self.device)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return self.split.num_tokens

    @cached_property
    def everyone(self) -> Tensor:
        """``[T]`` int64: the tokens of all ranks, rank by rank."""
        return torch.from_numpy(np.concatenate(self.split.rows)).to(self.device)

    @cached_property
    def in_order(self) -> Tensor:
        """``[T]`` int64: where each token is among those of all ranks."""
        return self.everyone.argsort()

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole row of a tensor that has this rank's tokens along ``dim``; gradients add up over the ranks."""
        whole: Tensor = _Gather.apply(self, tensor.movedim(dim, 0))
        return whole.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """``[t, ...]`` of each rank -> ``[T, ...]``; the gradient of a token is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: SequencePart, own: Tensor) -> Tensor:
        ctx.part = part
        numbers = [len(rows) for rows in part.split.rows]
        padded = own.new_zeros(max(numbers), *own.shape[1:])
        padded[: len(own)] = own
        gathered = own.new_empty(len(numbers) * max(numbers), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=part.group)
        parts = [rows[:number] for rows, number in zip(gathered.split(max(numbers)), numbers, strict=True)]
        return torch.cat(parts)[part.in_order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        part: SequencePart = ctx.part
        numbers = [len(rows) for rows in part.split.rows]
        own = numbers[part.place]
        received = gradient.new_empty(len(numbers) * own, *gradient.shape[1:])
        sent = gradient[part.everyone]
        dist.all_to_all_single(received, sent, [own] * len(numbers), numbers, group=part.group)
        summed = received.view(len(numbers), own, *gradient.shape[1:]).sum(0, dtype=torch.float32)
        return None, summed.to(gradient.dtype)
