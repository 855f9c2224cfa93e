"""This rank's part of a packed row that the ranks of a sequence group share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.models.foundation.sequence_slice import fewest_tokens
from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.device import to_device
from omnitrain.parallel.sequence.head_exchange import equal_spans, heads_to_rows, rows_to_heads
from omnitrain.parallel.sequence.ulysses import UlyssesShard
from omnitrain.parallel.state import ParallelState
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


def part_of_call(state: ParallelState, num_rows: int, device: torch.device) -> SequencePart | None:
    """What this rank has of the rows of a tower's call, which all ranks that share a sequence make; None: all of them.

    A tower attends within items, in both directions, and has no ring: the ranks of one take part as the others do.

    Args:
        state: of the foundation.
        num_rows: of the call; too few for its ranks are not dealt.
        device: of the rows.
    """
    ranks = state.size("sequence")
    if num_rows < fewest_tokens(ranks):
        return None
    split = split_sequence(num_rows, sp=ranks)
    shard = UlyssesShard(split, state.sequence_group)
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
        return to_device(self.host_rows, self.device)

    @property
    def host_rows(self) -> Tensor:
        """``rows``, on the host."""
        return torch.from_numpy(self.split.rows[self.place])

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return self.split.num_tokens

    @cached_property
    def in_order(self) -> Tensor:
        """``[T]`` int64: where each token is among those of all ranks, rank by rank."""
        return to_device(torch.from_numpy(np.concatenate(self.split.rows).argsort()), self.device)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the row."""
        return len(self.split.rows)

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compute over the whole row of this rank's share of the heads; see :class:`RowPart`."""
        counts = [len(rows) for rows in self.split.rows]
        heads = equal_spans(tensors[0].size(1), self.num_ranks)
        gathered = rows_to_heads(tensors, [heads] * len(tensors), counts, self.group)
        whole = compute([states[self.in_order] for states in gathered], slice(*heads[self.place]))
        (own,) = heads_to_rows([whole[self.in_order.argsort()]], [heads], counts, self.group)
        return own

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole row of a tensor that has this rank's tokens along ``dim``; gradients add up over the ranks."""
        counts = [len(rows) for rows in self.split.rows]
        return gather_rows(tensor.movedim(dim, 0), counts, self.group)[self.in_order].movedim(0, dim)
