"""Ulysses: for an attention, the ranks that share a row exchange their rows of all heads for all rows of some heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from omnitrain.errors import UserError
from omnitrain.ops.attention.spec import Call
from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.device import to_device
from omnitrain.parallel.sequence.head_exchange import HeadSpans, equal_spans, heads_to_rows, rows_to_heads
from omnitrain.parallel.sequence.ring import ring_attention
from omnitrain.plan.sequence import SequenceSplit


def head_problem(num_heads: int, sp: int) -> str | None:
    """Why ``sp`` ranks cannot share an attention with ``num_heads`` query heads; None: they can.

    Key heads set no limit: where they are fewer than ranks, several ranks get the same one.
    """
    try:
        equal_spans(num_heads, sp)
    except UserError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class OwnHeads:
    """How the heads of an attention are dealt to the ranks.

    Attributes:
        queries: of each rank.
        keys: the key heads that each rank's queries read; neighbours share one where it lies across their border.
        own_keys: for each of this rank's queries its key head, counted from its first; None: equally many queries read
            each, as attention expects.
    """

    queries: HeadSpans
    keys: HeadSpans
    own_keys: list[int] | None


def deal_heads(num_heads: int, num_key_heads: int, ranks: int, rank: int) -> OwnHeads:
    """Deal the heads of an attention to ``ranks``, equally many queries to each.

    Raises:
        UserError: see :func:`head_problem`.
    """
    queries = equal_spans(num_heads, ranks)
    readers = num_heads // num_key_heads
    keys = [(start // readers, (stop - 1) // readers + 1) for start, stop in queries]
    own = [head // readers - keys[rank][0] for head in range(*queries[rank])]
    counts = {own.count(key) for key in own}
    return OwnHeads(queries, keys, own if len(counts) > 1 else None)


def of_own_heads(call: Call, heads: OwnHeads, rank: int) -> Call:
    """The call of a rank over the whole row, from states of its own heads and all else of all heads."""
    key, value, own, bias = call.key, call.value, slice(*heads.queries[rank]), call.position_bias
    if heads.own_keys is not None:
        index = to_device(torch.tensor(heads.own_keys), key.device)
        key, value = key.index_select(1, index), value.index_select(1, index)
    return replace(
        call,
        key=key,
        value=value,
        mask=call.mask.of_heads(own.start, own.stop),
        position_bias=bias if bias is None or bias.size(1) == 1 else bias[:, own],
        sinks=None if call.sinks is None else call.sinks[own],
    )


@dataclass(frozen=True, eq=False)
class UlyssesShard:
    """This rank's rows of a row that ``split`` deals to the ranks of two groups; attention over it.

    A :class:`~omnitrain.ops.attention.spec.SequenceShard`, to be hung on a mask by ``MaskSpec.on``.

    Attributes:
        split: of the row.
        sp_group: the ranks that exchange rows for heads.
        cp_group: the ranks that attend around a ring; None: there is none.
    """

    split: SequenceSplit
    sp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup | None = None

    @cached_property
    def rows_of_ranks(self) -> list[int]:
        """Rows of each rank of ``sp_group``."""
        cp_rank = 0 if self.cp_group is None else dist.get_rank(self.cp_group)
        return [len(rows) for rows in self.split.rows_of_ring(cp_rank)]

    @cached_property
    def rank(self) -> int:
        """Place in ``sp_group``."""
        return dist.get_rank(self.sp_group)

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return self.rows_of_ranks[self.rank]

    def attend(self, call: Call, compute: Callable[[Call], Tensor]) -> Tensor:
        """See :class:`~omnitrain.ops.attention.spec.SequenceShard`.

        Queries, keys and values travel in one all-to-all, the output in another. A rank is sent each key head that its
        queries read, and no other.

        Raises:
            UserError: the ranks do not divide the heads, or the ring does not honour what the call asks for.
        """
        heads = deal_heads(call.query.size(1), call.key.size(1), self.split.sp, self.rank)
        if self.split.sp == 1:
            return self.attend_own_heads(call, heads, compute)
        states = [tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value)]
        gathered = rows_to_heads(states, [heads.queries, heads.keys, heads.keys], self.rows_of_ranks, self.sp_group)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in gathered)
        output = self.attend_own_heads(replace(call, query=query, key=key, value=value), heads, compute)
        (own,) = heads_to_rows([output[0]], [heads.queries], self.rows_of_ranks, self.sp_group)
        return own[None]

    def attend_own_heads(self, call: Call, heads: OwnHeads, compute: Callable[[Call], Tensor]) -> Tensor:
        """From states of this rank's heads and all rows of its ``sp_group``: ``[1, these rows, own heads, E]``."""
        own = of_own_heads(call, heads, self.rank)
        if self.cp_group is None or self.split.cp == 1:
            return compute(own)
        return ring_attention(own, self.split, self.cp_group, compute)

    def gather_tables(self, table: Tensor, dim: int) -> Tensor:
        """All rows of its ``sp_group`` of a tensor without gradients that has this rank's rows along ``dim``.

        Layers that share a tensor share what was gathered.
        """
        if table not in self._tables:
            own = table.detach().movedim(dim, 0)
            self._tables[table] = gather_rows(own, self.rows_of_ranks, self.sp_group).movedim(0, dim)
        return self._tables[table]

    @cached_property
    def _tables(self) -> WeakTensorKeyDictionary:
        return WeakTensorKeyDictionary()
