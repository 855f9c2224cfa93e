"""This rank's slice of a pack that the ranks of a sequence group share."""

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
from omnitrain.ops.host_values import to_device
from omnitrain.parallel.sequence.head_exchange import equal_spans, heads_to_tokens, tokens_to_heads
from omnitrain.parallel.sequence.ulysses import UlyssesShard
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.sequence import SequenceSplit, split_sequence


def slice_of(state: ParallelState, num_tokens: int, device: torch.device) -> RankSlice | None:
    """Return this rank's slice of a pack, which will be padded if it is too short; None: the rank has all tokens."""
    ranks = state.size("sequence")
    if ranks == 1:
        return None
    split = split_sequence(max(num_tokens, fewest_tokens(ranks)), sp=state.size("sp"), cp=state.size("cp"))
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    return RankSlice(split, state.rank_in("sequence"), shard, state.sequence_group, device)


def slice_of_call(state: ParallelState, num_rows: int, device: torch.device) -> RankSlice | None:
    """Return this rank's slice of the rows of a tower's call, which the sequence group makes; None: all rows.

    A tower has no ring attention, so the cp ranks of the group take part in Ulysses, too. ``state`` is that of the
    foundation; too few rows for the ranks are not divided.
    """
    ranks = state.size("sequence")
    if num_rows < fewest_tokens(ranks):
        return None
    split = split_sequence(num_rows, sp=ranks)
    shard = UlyssesShard(split, state.sequence_group)
    return RankSlice(split, state.rank_in("sequence"), shard, state.sequence_group, device)


@dataclass(frozen=True, eq=False)
class RankSlice:
    """The slice of ``rank`` of ``group`` of a sequence; ``attention`` attends over the whole sequence."""

    split: SequenceSplit
    rank: int
    attention: UlyssesShard
    group: dist.ProcessGroup
    device: torch.device

    @cached_property
    def positions(self) -> Tensor:
        """``[t]`` int64, ascending: the positions of this rank's tokens."""
        return to_device(self.host_positions, self.device)

    @property
    def host_positions(self) -> Tensor:
        """``positions`` on the host."""
        return torch.from_numpy(self.split.positions[self.rank])

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole sequence."""
        return self.split.num_tokens

    @cached_property
    def in_order(self) -> Tensor:
        """``[T]`` int64: the index of each token in the concatenated slices of all ranks."""
        return to_device(torch.from_numpy(np.concatenate(self.split.positions).argsort()), self.device)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return len(self.split.positions)

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compute over the whole sequence of this rank's heads; see :class:`SequenceSlice`."""
        counts = [len(positions) for positions in self.split.positions]
        heads = equal_spans(tensors[0].size(1), self.num_ranks)
        gathered = tokens_to_heads(tensors, [heads] * len(tensors), counts, self.group)
        whole = compute([states[self.in_order] for states in gathered], slice(*heads[self.rank]))
        (local,) = heads_to_tokens([whole[self.in_order.argsort()]], [heads], counts, self.group)
        return local

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """All-gather a tensor that has this rank's tokens along ``dim``; the backward sums over the ranks."""
        counts = [len(positions) for positions in self.split.positions]
        return gather_rows(tensor.movedim(dim, 0), counts, self.group)[self.in_order].movedim(0, dim)
