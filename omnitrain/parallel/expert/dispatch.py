"""Rows of tokens on their way to the ranks of their experts and back, while these compute.

A rank's experts compute in chunks, one after the other, and each chunk's rows travel by themselves. All leave at once;
while the experts of one chunk compute, rows of the next ones arrive and results of those before go back::

    on the way   rows 0 | rows 1    | rows 2    | results 0 | results 1 | results 2
    experts               chunk 0   | chunk 1   | chunk 2   |

Chunks are of experts, not of tokens: an expert computes all of its rows at once whatever the number of chunks, so
nothing changes with it, not even in the last bit. The order of a backward is what autograd makes of that of the
forward: what was begun last is asked first. So each exchange is two nodes, one of which starts it in the forward and
ends its transpose in the backward, the other the reverse.

Gradients of weights are those of all chunks put together, and what is put into its place is there twice. So they are
computed in pieces that stay small where there are few chunks; their rows are counted with those that travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnitrain.ops.experts import (
    ExpertRange,
    LayerSpans,
    TokenPermutation,
    chunk_borders,
    is_replaying,
    sort_by_expert,
    token_gradients,
    weighted_sum_gradients,
    weighted_sums,
)

Wait = Callable[[], Any]

_PIECES = 16  # of a rank's experts


class Link(Protocol):
    """All-to-alls of rows among ranks; keeps what is under way until somebody waited for it.

    Attributes:
        rank: this one's place.
        size: number of ranks.
    """

    rank: int
    size: int

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Wait:
        """Send ``rows`` ``[sum of sent, H]`` to the ranks in order, and get theirs into ``out``.

        Neither may be touched before what this returns is called: behind that, ``out`` is there for whatever the
        device is told next. All ranks start the same exchanges in the same order.
        """
        ...

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """``[size, n]``: row ``r`` goes to rank ``r``, row ``s`` of the result comes from rank ``s``."""
        ...


class GroupLink:
    """The link of a process group: gloo moves rows in threads of its own, NCCL on a stream of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Wait:  # noqa: D102
        work = dist.all_to_all_single(out, rows, received, sent, group=self._group, async_op=True)
        return work.wait

    def exchange_counts(self, counts: Tensor) -> Tensor:  # noqa: D102
        found = torch.empty_like(counts)
        dist.all_to_all_single(found, counts, group=self._group)
        return found


@dataclass(frozen=True, eq=False)
class ChunkSplits:
    """What travels for one chunk of experts.

    Attributes:
        sent: rows that go to each rank.
        received: rows that come from each rank.
        by_expert: ``[R]`` int64: the rows as they come, by sender, in order of this rank's experts.
        by_sender: the inverse.
        ends: ``[E]`` int32: of each expert's rows in that order.
        ranges: of the chunk.
    """

    sent: list[int]
    received: list[int]
    by_expert: Tensor
    by_sender: Tensor
    ends: Tensor
    ranges: list[ExpertRange]


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """The ways of one layer's rows.

    Attributes:
        routes: this rank's tokens to rows sorted by the chunk of their experts, then by rank, then by expert.
        chunks: the splits of each chunk of experts.
    """

    routes: TokenPermutation
    chunks: tuple[ChunkSplits, ...]

    def rows_to_others(self, rank: int) -> int:
        """That ``rank`` sends them in a forward: tokens' and results'."""
        ways = (way for splits in self.chunks for way in (splits.sent, splits.received))
        return sum(sum(way) - way[rank] for way in ways)


class RankDispatcher:
    """Brings rows over a link, each of whose ranks has an equal part of the experts, in order.

    Every rank takes part in every call, with any number of tokens. Planning waits for the device once; the other steps
    do not.

    Args:
        link: of the experts.
        chunks: of experts on each rank, at most as many as there are. May change between steps, on all ranks alike.
    """

    def __init__(self, link: Link, chunks: int = 1) -> None:
        self.bytes_sent = 0
        self.link, self.chunks = link, chunks

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> DispatchPlan:
        """Exchange counts; see :class:`omnitrain.ops.experts.Dispatcher`."""
        order = _Order.of(num_experts, self.link.size, self.chunks, top_k_index.device)
        routes = sort_by_expert(order.number[top_k_index], num_experts)
        to_send = routes.counts[order.number].view(self.link.size, -1)
        with spans.waiting("counts"):
            to_get = self.link.exchange_counts(to_send)
        return DispatchPlan(routes, _chunk_splits(to_send, to_get, order))

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: DispatchPlan, spans: LayerSpans) -> ChunkedDispatch:
        """See :class:`omnitrain.ops.experts.Dispatcher`."""
        if not is_replaying():
            self.bytes_sent += plan.rows_to_others(self.link.rank) * tokens.size(1) * tokens.element_size()
        return ChunkedDispatch(self.link, plan, tokens, weights, spans)


@dataclass(frozen=True, eq=False)
class _Order:
    """Experts by chunk, then by rank, then by number.

    Attributes:
        sizes: of the chunks, in experts of a rank.
        ranges: of each chunk: borders in its experts.
        piece_borders: ``[all of these]`` int64: the same among a rank's experts.
        borders: ``[chunks + 1]`` int64: of these, among a rank's experts.
        experts: ``[E]`` int64 in that order.
        number: the inverse: each expert's place in it.
        chunk_start: ``[experts of a rank]`` int64: where the chunk of each begins.
    """

    sizes: list[int]
    ranges: list[tuple[int, ...]]
    range_borders: Tensor
    borders: Tensor
    experts: Tensor
    number: Tensor
    chunk_start: Tensor

    @classmethod
    @cache  # a device that gets numbers of the host is waited for
    def of(cls, num_experts: int, ranks: int, chunks: int, device: torch.device) -> _Order:
        by_rank = torch.arange(num_experts, device=device).view(ranks, -1)
        at = chunk_borders(by_rank.size(1), chunks)
        sizes, borders = [stop - start for start, stop in pairwise(at)], torch.tensor(at, device=device)
        # A single chunk's gradients are those of all experts: nothing is put together.
        ranges = [chunk_borders(size, min(size, -(-_PIECES // chunks)) if chunks > 1 else 1) for size in sizes]
        range_borders = torch.tensor([start + border for start, own in zip(at, ranges, strict=False) for border in own])
        experts = torch.cat([part.flatten() for part in by_rank.split(sizes, dim=1)])
        chunk_start = borders[:-1].repeat_interleave(borders.diff(), output_size=by_rank.size(1))
        return cls(sizes, ranges, range_borders.to(device), borders, experts, experts.argsort(), chunk_start)


def _chunk_splits(to_send: Tensor, to_get: Tensor, order: _Order) -> tuple[ChunkSplits, ...]:
    """From the rows ``[ranks, experts of a rank]`` that go to each rank's experts, and come to this rank's."""
    up_to = F.pad(torch.stack([to_send, to_get]).cumsum(-1), (1, 0))[..., order.borders]
    own_rows = F.pad(to_get.sum(0).cumsum(0), (1, 0))
    of_ranks, of_ranges = up_to.diff(dim=-1).transpose(1, 2), own_rows[order.range_borders]
    numbers = iter(torch.cat([of_ranks.flatten(), of_ranges]).tolist())  # the one wait for the device
    sent, received = ([list(islice(numbers, len(to_get))) for _ in order.sizes] for _ in range(2))
    ranges = [_ranges(borders, list(islice(numbers, len(borders)))) for borders in order.ranges]
    # Blocks of rows of one sender for one expert. They come by chunk, sender, expert, and are wanted by expert, sender.
    of_block = to_get.flatten().long()
    comes_at = torch.empty_like(of_block).scatter_(0, order.experts, _starts(of_block[order.experts]))
    wanted_at = _starts(to_get.t().flatten().long()).view(to_get.size(1), -1)
    chunk_at = wanted_at[order.chunk_start, 0]  # [experts of a rank]
    total = sum(map(sum, received))
    row = torch.arange(total, device=to_get.device)
    ahead = comes_at.view_as(to_get).t() - wanted_at
    by_expert = row + (ahead - chunk_at[:, None]).flatten().repeat_interleave(to_get.t().flatten(), output_size=total)
    behind = (-ahead - chunk_at[:, None]).t().flatten()[order.experts]
    by_sender = row + behind.repeat_interleave(of_block[order.experts], output_size=total)
    ends = (own_rows[1:] - chunk_at).to(torch.int32)
    sizes = [sum(rows) for rows in received]
    split = by_expert.split(sizes), by_sender.split(sizes), ends.split(order.sizes)
    return tuple(ChunkSplits(*splits) for splits in zip(sent, received, *split, ranges, strict=True))


def _ranges(borders: Sequence[int], rows: Sequence[int]) -> list[ExpertRange]:
    """Of a chunk, from borders among its experts, and rows of this rank before each of these."""
    of_ranges = zip(pairwise(borders), pairwise(rows), strict=True)
    return [ExpertRange(*own, first - rows[0], end - rows[0]) for own, (first, end) in of_ranges]


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


class ChunkedDispatch:
    """A :class:`omnitrain.ops.experts.DispatchHandle` between ranks.

    What is on its way hangs here, not on the layer: forwards of several micro-batches may wait for their backwards.
    """

    def __init__(self, link: Link, plan: DispatchPlan, tokens: Tensor, weights: Tensor, spans: LayerSpans) -> None:
        self.ranges: Sequence[Sequence[ExpertRange]] = [splits.ranges for splits in plan.chunks]
        self._plan, self._in_flight, self._weights = plan, _InFlight(link, plan, spans), weights
        self._rows: tuple[Tensor, ...] = _Depart.apply(self._in_flight, tokens)
        self._results: list[Tensor] = []

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        return _Arrive.apply(self._in_flight, chunk, self._rows[chunk]), self._plan.chunks[chunk].ends

    def return_chunk(self, chunk: int, results: Tensor) -> None:  # noqa: D102
        self._results.append(_SendBack.apply(self._in_flight, chunk, results))

    def combine(self) -> Tensor:  # noqa: D102
        combined: Tensor = _Combine.apply(self._in_flight, self._weights, *self._results)
        return combined


class _InFlight:
    """What is on its way, in a forward and then in its backward: of each chunk at most one exchange at a time."""

    def __init__(self, link: Link, plan: DispatchPlan, spans: LayerSpans) -> None:
        self.plan = plan
        self._link, self._spans = link, spans
        stops = list(accumulate((sum(splits.sent) for splits in plan.chunks), initial=0))
        self._places = [slice(start, stop) for start, stop in pairwise(stops)]
        self._of_tokens: Tensor | None = None
        self._coming: dict[int, tuple[Tensor, Wait]] = {}

    def tokens_of(self, chunk: int) -> Tensor:
        """``[rows sent]`` int64: the token of each."""
        return self.plan.routes.token_of_row[self._places[chunk]]

    def of_chunk(self, chunk: int, rows: Tensor) -> Tensor:
        """``[rows sent, H]`` of the rows of all tokens ``[S, H]``."""
        return rows[self._places[chunk]]

    def to_experts(self, chunk: int, rows: Tensor, *, backward: bool = False) -> None:
        """Send ``[rows sent, H]``; what comes is ``[rows received, H]``."""
        splits = self.plan.chunks[chunk]
        out = rows.new_empty(sum(splits.received), rows.size(1))
        wait = self._link.start(out, rows, splits.received, splits.sent)
        name = "combine" if backward else "dispatch"
        self._coming[chunk] = out, self._spans.travelling(name, chunk, wait, backward=backward)

    def to_tokens(self, chunk: int, rows: Tensor, *, backward: bool = False) -> None:
        """Send ``[rows received, H]``; what comes is ``[rows sent, H]``, the chunk's part of the rows of all tokens."""
        splits = self.plan.chunks[chunk]
        if self._of_tokens is None:
            self._of_tokens = rows.new_empty(self._places[-1].stop, rows.size(1))
        out = self._of_tokens[self._places[chunk]]
        wait = self._link.start(out, rows, splits.sent, splits.received)
        name = "dispatch" if backward else "combine"
        self._coming[chunk] = out, self._spans.travelling(name, chunk, wait, backward=backward)

    def landed(self, chunk: int) -> Tensor:
        """What comes for a chunk, there."""
        out, wait = self._coming.pop(chunk)
        wait()
        return out

    def all_landed(self) -> Tensor:
        """The rows of all tokens ``[S, H]``, there."""
        for chunk in list(self._coming):  # in the order in which they were started
            self.landed(chunk)
        of_tokens, self._of_tokens = self._of_tokens, None
        assert of_tokens is not None
        return of_tokens


def _under_way(rows: int, like: Tensor) -> Tensor:
    """``[rows, H]`` in place of rows that come: ties nodes of autograd together. The cargo has them behind the wait."""
    return like.new_zeros(()).expand(rows, like.size(1))


class _Depart(torch.autograd.Function):
    """Tokens to rows of all chunks, under way. The gradient is summed per token when those of all chunks are back."""

    @staticmethod
    def forward(ctx: Any, in_flight: _InFlight, tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.in_flight = in_flight
        for chunk in range(len(in_flight.plan.chunks)):
            in_flight.to_experts(chunk, tokens.index_select(0, in_flight.tokens_of(chunk)))
        return tuple(_under_way(sum(splits.received), tokens) for splits in in_flight.plan.chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, token_gradients(ctx.in_flight.all_landed(), ctx.in_flight.plan.routes)


class _Arrive(torch.autograd.Function):
    """The rows of a chunk, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, in_flight: _InFlight, chunk: int, coming: Tensor) -> Tensor:
        ctx.in_flight, ctx.chunk = in_flight, chunk
        return in_flight.landed(chunk).index_select(0, in_flight.plan.chunks[chunk].by_expert)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        in_flight: _InFlight = ctx.in_flight
        in_flight.to_tokens(
            ctx.chunk, gradient.index_select(0, in_flight.plan.chunks[ctx.chunk].by_sender), backward=True
        )
        return None, None, _under_way(len(gradient), gradient)


class _SendBack(torch.autograd.Function):
    """Results of a chunk, under way."""

    @staticmethod
    def forward(ctx: Any, in_flight: _InFlight, chunk: int, results: Tensor) -> Tensor:
        ctx.in_flight, ctx.chunk = in_flight, chunk
        splits = in_flight.plan.chunks[chunk]
        in_flight.to_tokens(chunk, results.index_select(0, splits.by_sender))
        return _under_way(sum(splits.sent), results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return (
            None,
            None,
            ctx.in_flight.landed(ctx.chunk).index_select(0, ctx.in_flight.plan.chunks[ctx.chunk].by_expert),
        )


class _Combine(torch.autograd.Function):
    """Results of all chunks to the weighted sum of each token's."""

    @staticmethod
    def forward(ctx: Any, in_flight: _InFlight, weights: Tensor, *results: Tensor) -> Tensor:
        rows = in_flight.all_landed()
        ctx.in_flight = in_flight
        ctx.save_for_backward(rows, weights)
        return weighted_sums(rows, weights, in_flight.plan.routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        in_flight: _InFlight = ctx.in_flight
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = weighted_sum_gradients(gradient, rows, weights, in_flight.plan.routes)
        chunks = in_flight.plan.chunks
        if any(ctx.needs_input_grad[2:]):
            for chunk in reversed(range(len(chunks))):  # the last one is asked first
                in_flight.to_experts(chunk, in_flight.of_chunk(chunk, of_rows), backward=True)
        return None, of_weights, *(_under_way(sum(splits.sent), of_rows) for splits in chunks)
