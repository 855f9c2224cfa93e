"""Ring attention: queries stay, keys and values are passed around the cp ranks; exact in forward and backward.

A rank attends locally to samples that it has completely. Only samples that are split between ranks take part in the
ring. While a rank computes with one block, it receives the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnitrain.errors import UserError
from omnitrain.ops.attention import online_softmax
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec
from omnitrain.plan.ring import Block, Run, SlicePart, parts_of_slice
from omnitrain.plan.sequence import SequenceSplit


def ring_attention(
    call: AttentionCall, split: SequenceSplit, group: dist.ProcessGroup, compute: Callable[[AttentionCall], Tensor]
) -> Tensor:
    """Attend from the tokens of a cp rank to the whole sequence: ``[1, tokens of the cp rank, heads, E]``. Collective.

    ``compute`` attends over a sequence that this rank has completely. Raises UserError: the call has dropout, a
    position bias, or a mask with gradients.
    """
    _require_supported(call)
    of_ranks = call.mask.remember(
        ("parts", split.cp),
        lambda: tuple(parts_of_slice(split.chunks(rank), call.mask.offsets) for rank in range(split.cp)),
    )
    parts = of_ranks[dist.get_rank(group)]
    lengths = [part.length for part in parts]
    states = [tensor.split(lengths, dim=2) for tensor in (call.query, call.key, call.value)]
    outputs: dict[int, Tensor] = {}
    for index, part in enumerate(parts):
        if part.segment is None:
            query, key, value = (of_parts[index] for of_parts in states)
            start, stop = part.start, part.stop
            mask = call.mask.remember(("between", start, stop), partial(call.mask.between, start, stop))
            outputs[index] = compute(replace(call, query=query, key=key, value=value, mask=mask))
    if any(part.segment is not None for rank in of_ranks for part in rank):
        ring = _Ring(call.mask, of_ranks, group, online_softmax.Scoring(call.mask, call.scaling, call.softcap))
        outputs |= _attend_pieces(ring, states, call.sinks)
    return torch.cat([outputs[index] for index in sorted(outputs)], dim=1)


def _attend_pieces(ring: _Ring, states: Sequence[Sequence[Tensor]], sinks: Tensor | None) -> dict[int, Tensor]:
    """Index of a part of the slice -> its attention. A rank without pieces passes on keys and values of other ranks."""
    parts = ring.parts[ring.rank]
    pieces = [index for index, part in enumerate(parts) if part.segment is not None]
    query, key, value = (
        (torch.cat([of_parts[index] for index in pieces], dim=2) if pieces else of_parts[0][:, :, :0])[0]
        for of_parts in states
    )
    out = _RingAttention.apply(ring, query, key, value, sinks).transpose(0, 1)[None]
    if not pieces:
        return {len(parts): out}  # without tokens, so that the backward runs on this rank
    return dict(zip(pieces, out.split([parts[index].length for index in pieces], dim=1), strict=True))


def _require_supported(call: AttentionCall) -> None:
    mask = call.mask.general
    obstacles = {
        "dropout": call.dropout > 0,
        "a position bias": call.position_bias is not None,
        "a mask with gradients": isinstance(mask, Tensor) and mask.requires_grad,
    }
    if unsupported := [name for name, is_used in obstacles.items() if is_used]:
        raise UserError(f"ring attention does not support {', '.join(unsupported)}; set cp to 1")


@dataclass(frozen=True, eq=False)
class _Ring:
    """The pieces of samples on each rank, and the scoring of their blocks."""

    mask: MaskSpec
    parts: tuple[tuple[SlicePart, ...], ...]
    group: dist.ProcessGroup
    scoring: online_softmax.Scoring

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def pieces(self, rank: int) -> list[tuple[int, SlicePart]]:
        """The pieces of a rank, each with its start in the concatenated pieces."""
        start, pieces = 0, []
        for part in self.parts[rank]:
            if part.segment is not None:
                pieces.append((start, part))
                start += part.length
        return pieces

    def num_tokens(self, rank: int) -> int:
        return sum(part.length for _, part in self.pieces(rank))

    def held(self, step: int) -> int:
        """The rank whose keys and values this rank holds in a step."""
        return (self.rank - step) % len(self.parts)

    def blocks(self, owner: int, device: torch.device) -> Iterator[tuple[slice, slice, Block]]:
        """Yield the unmasked blocks between this rank's queries and the keys of ``owner``: rows, columns, block."""
        for first, queries in self.pieces(self.rank):
            for first_key, keys in self.pieces(owner):
                if queries.segment != keys.segment:
                    continue
                runs: tuple[Run, Run] = (queries.start, queries.stop), (keys.start, keys.stop)
                for block in online_softmax.blocks_between(self.mask, *runs, device):
                    rows, columns = first - queries.start, first_key - keys.start
                    yield (
                        slice(block.queries[0] + rows, block.queries[1] + rows),
                        slice(block.keys[0] + columns, block.keys[1] + columns),
                        block,
                    )


class _Hop:
    """A send of tensors to the next rank, and a receive from the previous one."""

    def __init__(self, ring: _Ring, sent: Sequence[Tensor], arriving_from: int) -> None:
        """``arriving_from``: the rank whose keys arrive."""
        peers = dist.get_process_group_ranks(ring.group)
        after, before = peers[(ring.rank + 1) % len(ring.parts)], peers[(ring.rank - 1) % len(ring.parts)]
        tokens = ring.num_tokens(arriving_from)
        self._sent = [tensor.contiguous() for tensor in sent]
        self._arriving = [tensor.new_empty(tensor.size(0), tokens, tensor.size(2)) for tensor in sent]
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, after, ring.group) for tensor in self._sent]
            + [dist.P2POp(dist.irecv, tensor, before, ring.group) for tensor in self._arriving]
        )

    def arrived(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._arriving


def _around(ring: _Ring, own: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the owner, keys and values of each rank in turn, while the next ones are in flight."""
    held = list(own)
    for step in range(len(ring.parts)):
        hop = _Hop(ring, held, ring.held(step + 1)) if step + 1 < len(ring.parts) else None
        yield ring.held(step), held
        if hop is not None:
            held = hop.arrived()


class _RingAttention(torch.autograd.Function):
    """``[H, N, D], [K, N, D], [K, N, E], [H] -> [H, N, E]`` of the pieces of this rank."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        state = online_softmax.RunningSoftmax(query, value.size(-1))
        for owner, (keys, values) in _around(ring, (key, value)):
            for rows, columns, block in ring.blocks(owner, query.device):
                states = query[:, rows], keys[:, columns], values[:, columns]
                state.add(rows, *online_softmax.attend_block(states, block, ring.scoring))
        if sinks is not None:
            state.add_sinks(sinks)
        output = state.out.to(value.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, output, state.lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad = grad.contiguous()
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        sums: _Hop | None = None  # gradients of keys and values, passed on one step after these
        for owner, (keys, values) in _around(ring, (key, value)):
            of_keys, of_values = (torch.zeros_like(x, dtype=lse.dtype) for x in (keys, values))
            for rows, columns, block in ring.blocks(owner, query.device):
                states = query[:, rows], keys[:, columns], values[:, columns]
                dq, dk, dv = online_softmax.attend_block_backward(
                    grad[:, rows], states, output[:, rows], lse[:, rows], block, ring.scoring
                )
                of_query[:, rows] += dq
                of_keys[:, columns] += dk
                of_values[:, columns] += dv
            if sums is not None:
                for total, before in zip((of_keys, of_values), sums.arrived(), strict=True):
                    total += before
            sums = _Hop(ring, (of_keys, of_values), (owner - 1) % len(ring.parts))
        assert sums is not None
        of_key, of_value = sums.arrived()
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(lse)[:, None] - lse).exp()
            of_sinks = -(share * online_softmax.row_products(output, grad)).sum(-1).to(sinks.dtype)
        return None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks
