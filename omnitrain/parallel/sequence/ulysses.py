"""Ulysses attention: ranks exchange their tokens of all heads for all tokens of some heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from omnitrain.errors import UserError
from omnitrain.ops.attention.spec import AttentionCall
from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.host_values import to_device
from omnitrain.parallel.sequence.head_exchange import HeadSpans, equal_spans, heads_to_tokens, tokens_to_heads
from omnitrain.parallel.sequence.ring import ring_attention
from omnitrain.plan.sequence import SequenceSplit


def head_problem(num_heads: int, sp: int) -> str | None:
    """Return why ``sp`` ranks cannot divide ``num_heads`` query heads, whatever the key heads; None: they can."""
    try:
        equal_spans(num_heads, sp)
    except UserError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class OwnHeads:
    """The division of attention heads among ranks."""

    queries: HeadSpans  # query heads of each rank
    keys: HeadSpans  # key heads that each rank's queries read; neighbouring ranks may share one
    # the key head of each of this rank's query heads, counted from the rank's first key head; None: each key head has
    # equally many query heads, as attention expects
    own_keys: list[int] | None


def deal_heads(num_heads: int, num_key_heads: int, ranks: int, rank: int) -> OwnHeads:
    """Divide the heads of an attention among ``ranks``, equally many query heads each; see :func:`head_problem`."""
    queries = equal_spans(num_heads, ranks)
    readers = num_heads // num_key_heads
    keys = [(start // readers, (stop - 1) // readers + 1) for start, stop in queries]
    key_of_query = [head // readers - keys[rank][0] for head in range(*queries[rank])]
    counts = {key_of_query.count(key) for key in key_of_query}
    return OwnHeads(queries, keys, key_of_query if len(counts) > 1 else None)


def of_own_heads(call: AttentionCall, heads: OwnHeads, rank: int) -> AttentionCall:
    """Return a rank's call over all tokens: its states have only the rank's heads, all other arguments all heads."""
    key, value, local, bias = call.key, call.value, slice(*heads.queries[rank]), call.position_bias
    if heads.own_keys is not None:
        index = to_device(torch.tensor(heads.own_keys), key.device)
        key, value = key.index_select(1, index), value.index_select(1, index)
    return replace(
        call,
        key=key,
        value=value,
        mask=call.mask.of_heads(local.start, local.stop),
        position_bias=bias if bias is None or bias.size(1) == 1 else bias[:, local],
        sinks=None if call.sinks is None else call.sinks[local],
    )


@dataclass(frozen=True, eq=False)
class UlyssesShard:
    """Attention over a sequence that ``split`` divides among the ranks of two groups.

    A :class:`~omnitrain.ops.attention.spec.SequenceShard`, attached to a mask by ``MaskSpec.on``. The ranks of
    ``sp_group`` exchange tokens for heads; the ranks of ``cp_group`` are a ring; None: no ring attention.
    """

    split: SequenceSplit
    sp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup | None = None

    @cached_property
    def lengths_of_ranks(self) -> list[int]:
        """The number of tokens of each rank of ``sp_group``."""
        cp_rank = 0 if self.cp_group is None else dist.get_rank(self.cp_group)
        return [len(positions) for positions in self.split.positions_of_ring(cp_rank)]

    @cached_property
    def rank(self) -> int:
        """The rank of this process in ``sp_group``."""
        return dist.get_rank(self.sp_group)

    @property
    def num_local_tokens(self) -> int:
        """The number of tokens of this rank."""
        return self.lengths_of_ranks[self.rank]

    def attend(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        """See :class:`~omnitrain.ops.attention.spec.SequenceShard`; a rank receives only key heads that it reads."""
        heads = deal_heads(call.query.size(1), call.key.size(1), self.split.sp, self.rank)
        if self.split.sp == 1:
            return self.attend_own_heads(call, heads, compute)
        states = [tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value)]
        gathered = tokens_to_heads(
            states, [heads.queries, heads.keys, heads.keys], self.lengths_of_ranks, self.sp_group
        )
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in gathered)
        output = self.attend_own_heads(replace(call, query=query, key=key, value=value), heads, compute)
        (local,) = heads_to_tokens([output[0]], [heads.queries], self.lengths_of_ranks, self.sp_group)
        return local[None]

    def attend_own_heads(
        self, call: AttentionCall, heads: OwnHeads, compute: Callable[[AttentionCall], Tensor]
    ) -> Tensor:
        """Attend with this rank's heads and all tokens of its ``sp_group``: ``[1, tokens, local heads, E]``."""
        local = of_own_heads(call, heads, self.rank)
        if self.cp_group is None or self.split.cp == 1:
            return compute(local)
        return ring_attention(local, self.split, self.cp_group, compute)

    def gather_tables(self, table: Tensor, dim: int) -> Tensor:
        """All-gather a tensor without gradients along ``dim`` over ``sp_group``, once for all layers that share it."""
        if table not in self._tables:
            local = table.detach().movedim(dim, 0)
            self._tables[table] = gather_rows(local, self.lengths_of_ranks, self.sp_group).movedim(0, dim)
        return self._tables[table]

    @cached_property
    def _tables(self) -> WeakTensorKeyDictionary:
        return WeakTensorKeyDictionary()
