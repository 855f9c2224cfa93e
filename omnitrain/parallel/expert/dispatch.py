"""Dispatch token rows to the ranks of their experts and combine the results, overlapped with the experts.

A rank's experts compute in chunks, and each chunk has its own all-to-alls. All dispatches start at once; while the
experts of one chunk compute, rows of later chunks arrive and results of earlier chunks return. Chunks divide experts,
not tokens, so their number does not change a bit of the result. Autograd runs the last node of the forward first. So
each exchange has two autograd nodes: the first starts it in the forward and waits for its transpose in the backward;
the second does the reverse. Weight gradients are computed in ranges of experts, since concatenating those of chunks
would hold them twice; the rows of the ranges are counted together with the splits of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnitrain.ops.collectives import gather_rows, with_backward
from omnitrain.ops.experts import permute
from omnitrain.ops.experts.entry import Dispatcher, DispatchHandle
from omnitrain.ops.experts.routing_tape import is_replaying
from omnitrain.ops.experts.timing import LayerSpans
from omnitrain.ops.experts.weights import ExpertRange, chunk_offsets
from omnitrain.ops.turns import give_turn

Wait = Callable[[], Any]

_RANGES = 16  # of a rank's experts, for weight gradients


class Link(Protocol):
    """All-to-alls of rows among ``size`` ranks; keeps the buffers of an exchange alive until it is waited for."""

    rank: int
    size: int

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Wait:
        """Send ``rows`` ``[sum of sent, H]`` to the ranks in order, and receive into ``out``.

        Do not read or write either tensor before calling the returned wait function; later work on the device may then
        use ``out``. All ranks must start the same exchanges in the same order.
        """

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Exchange ``[size, n]``: row ``r`` goes to rank ``r``, row ``s`` of the result comes from rank ``s``."""


class GroupLink:
    """The link of a process group; gloo exchanges rows in separate threads, NCCL on a separate stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Wait:  # noqa: D102
        work = dist.all_to_all_single(out, rows, received, sent, group=self._group, async_op=True)
        return work.wait

    def exchange_counts(self, counts: Tensor) -> Tensor:  # noqa: D102
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        return received


@dataclass(frozen=True, eq=False)
class ChunkSplits:
    """The exchange of one chunk of experts."""

    sent: list[int]  # number of rows sent to each rank
    received: list[int]  # number of rows received from each rank
    ends: Tensor  # [E] int32: end of each expert's rows after sorting
    ranges: list[ExpertRange]  # ranges of the chunk's experts, for weight gradients


@dataclass(eq=False)
class ReceivedOrder:
    """The orders of received rows, of all chunks; made when they are first needed, after rows were sent.

    A block is the rows of one sender for one expert, whose index is its place in its chunk less that in its order.
    """

    sizes: list[int]  # number of rows received in each chunk
    to_expert: tuple[Tensor, Tensor]  # of each block, in the order of experts: what its places change by, its rows
    to_sender: tuple[Tensor, Tensor]  # the same in the order of arrival

    @cached_property
    def by_expert(self) -> tuple[Tensor, ...]:
        """``[R]`` int64 of each chunk: sorts received rows, which come by sender, by this rank's experts."""
        return self._places(*self.to_expert)

    @cached_property
    def by_sender(self) -> tuple[Tensor, ...]:
        """The inverse."""
        return self._places(*self.to_sender)

    def _places(self, change: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        total = sum(self.sizes)
        places = torch.arange(total, device=rows.device) + change.repeat_interleave(rows, output_size=total)
        return places.split(self.sizes)


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """The exchange of one layer and of its chunks; ``routes`` sorts rows by chunk, then by rank, then by expert."""

    routes: permute.TokenPermutation
    chunks: tuple[ChunkSplits, ...]
    received: ReceivedOrder

    def rows_to_others(self, rank: int) -> int:
        """Return the number of rows that ``rank`` sends to other ranks in a forward: tokens and results."""
        counts = (count for splits in self.chunks for count in (splits.sent, splits.received))
        return sum(sum(count) - count[rank] for count in counts)


class RankDispatcher:
    """Dispatch rows over a link whose ranks have equally many experts, in order.

    All ranks must take part in every call, with any number of tokens. Only planning synchronizes with the device, once
    per call. ``chunks`` of a rank's experts, at most their number, may change between steps, equally on all ranks.
    """

    def __init__(self, link: Link, chunks: int = 1) -> None:
        self.bytes_sent = 0
        self.link, self.chunks = link, chunks

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> DispatchPlan:
        """Exchange counts; see :class:`omnitrain.ops.experts.Dispatcher`."""
        order = _Order.of(num_experts, self.link.size, self.chunks, top_k_index.device)
        routes = permute.sort_by_expert(order.position[top_k_index], num_experts)
        to_send = routes.counts[order.position].view(self.link.size, -1)
        with spans.waiting("counts"):
            to_receive = self.link.exchange_counts(to_send)
        return _planned(routes, to_send, to_receive, order)

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: DispatchPlan, spans: LayerSpans) -> ChunkedDispatch:
        """See :class:`omnitrain.ops.experts.Dispatcher`."""
        if not is_replaying():
            self.bytes_sent += plan.rows_to_others(self.link.rank) * tokens.size(1) * tokens.element_size()
        return ChunkedDispatch(self.link, plan, tokens, weights, spans)


@dataclass(frozen=True, eq=False)
class _Order:
    """The order of experts by chunk, then by rank, then by index."""

    sizes: list[int]  # number of a rank's experts in each chunk
    ranges: list[tuple[int, ...]]  # offsets of the ranges in each chunk, counted in the chunk's experts
    range_offsets: Tensor  # [total] int64: the same offsets, counted in a rank's experts
    offsets: Tensor  # [chunks + 1] int64: offsets of the chunks, counted in a rank's experts
    experts: Tensor  # [E] int64: the experts in this order
    position: Tensor  # [E] int64: the inverse, each expert's position in this order
    chunk_start: Tensor  # [experts of a rank] int64: the first expert of each expert's chunk

    @classmethod
    @cache  # because copies from the host to the device synchronize
    def of(cls, num_experts: int, ranks: int, chunks: int, device: torch.device) -> _Order:
        by_rank = torch.arange(num_experts, device=device).view(ranks, -1)
        starts = chunk_offsets(by_rank.size(1), chunks)
        sizes, offsets = [stop - start for start, stop in pairwise(starts)], torch.tensor(starts, device=device)
        # A single chunk's weight gradients cover all experts, so there is nothing to concatenate.
        ranges = [chunk_offsets(size, min(size, -(-_RANGES // chunks)) if chunks > 1 else 1) for size in sizes]
        range_offsets = torch.tensor(
            [start + offset for start, in_chunk in zip(starts, ranges, strict=False) for offset in in_chunk]
        )
        experts = torch.cat([of_chunk.flatten() for of_chunk in by_rank.split(sizes, dim=1)])
        chunk_start = offsets[:-1].repeat_interleave(offsets.diff(), output_size=by_rank.size(1))
        return cls(sizes, ranges, range_offsets.to(device), offsets, experts, experts.argsort(), chunk_start)


def _planned(routes: permute.TokenPermutation, to_send: Tensor, to_receive: Tensor, order: _Order) -> DispatchPlan:
    """The plan, from row counts ``[ranks, experts of a rank]`` to send and to receive.

    All that needs no size is queued before the host reads, so that the device has work while the host waits for it, and
    the exchange of rows can start right after.
    """
    up_to = F.pad(torch.stack([to_send, to_receive]).cumsum(-1), (1, 0))[..., order.offsets]
    rows_before = F.pad(to_receive.sum(0).cumsum(0), (1, 0))
    of_ranks, of_ranges = up_to.diff(dim=-1).transpose(1, 2), rows_before[order.range_offsets]
    read = torch.cat([of_ranks.flatten(), of_ranges])
    # A block is the rows of one sender for one expert. Blocks arrive by chunk, sender, expert; sort by expert, sender.
    of_block, sorted_blocks = to_receive.flatten().long(), to_receive.t().flatten()
    arrives_at = torch.empty_like(of_block).scatter_(0, order.experts, _starts(of_block[order.experts]))
    sorted_at = _starts(sorted_blocks.long()).view(to_receive.size(1), -1)
    chunk_at = sorted_at[order.chunk_start, 0]  # [experts of a rank]
    shift = arrives_at.view_as(to_receive).t() - sorted_at
    to_expert = (shift - chunk_at[:, None]).flatten(), sorted_blocks
    to_sender = (-shift - chunk_at[:, None]).t().flatten()[order.experts], of_block[order.experts]
    ends = (rows_before[1:] - chunk_at).to(torch.int32)

    counts = iter(read.tolist())  # the only synchronization with the device
    sent, received = ([list(islice(counts, len(to_receive))) for _ in order.sizes] for _ in range(2))
    ranges = []
    for offsets in order.ranges:
        rows = list(islice(counts, len(offsets)))
        of_chunk = zip(pairwise(offsets), pairwise(rows), strict=True)
        ranges.append([ExpertRange(*experts, first - rows[0], end - rows[0]) for experts, (first, end) in of_chunk])
    splits = zip(sent, received, ends.split(order.sizes), ranges, strict=True)
    places = ReceivedOrder([sum(rows) for rows in received], to_expert, to_sender)
    return DispatchPlan(routes, tuple(ChunkSplits(*each) for each in splits), places)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


class ChunkedDispatch:
    """A :class:`omnitrain.ops.experts.DispatchHandle` between ranks, with the exchanges in flight of one forward."""

    def __init__(self, link: Link, plan: DispatchPlan, tokens: Tensor, weights: Tensor, spans: LayerSpans) -> None:
        self.ranges: Sequence[Sequence[ExpertRange]] = [splits.ranges for splits in plan.chunks]
        self._plan, self._weights = plan, weights
        self._in_flight = in_flight = _ExpertExchanges(link, plan, spans)

        def start(tokens: Tensor) -> tuple[Tensor, ...]:
            token_of_row = plan.routes.token_of_row
            for chunk in range(len(plan.chunks)):
                in_flight.to_experts(chunk, tokens.index_select(0, token_of_row[in_flight.slices[chunk]]))
            return tuple(_placeholder(sum(splits.received), tokens) for splits in plan.chunks)

        def sum_gradients(*_: Tensor) -> Tensor:
            return permute.token_gradients(in_flight.wait_all(), plan.routes)

        self._rows: tuple[Tensor, ...] = with_backward(start, sum_gradients, tokens)
        self._results: list[Tensor] = []

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        order, in_flight = self._plan.received, self._in_flight

        def sorted_by_expert(_: Tensor) -> Tensor:
            by_expert = order.by_expert[chunk]  # queued before the device waits for rows
            return in_flight.wait(chunk).index_select(0, by_expert)

        def return_gradients(gradient: Tensor) -> Tensor:
            in_flight.to_tokens(chunk, gradient.index_select(0, order.by_sender[chunk]), backward=True)
            return _placeholder(len(gradient), gradient)

        return with_backward(sorted_by_expert, return_gradients, self._rows[chunk]), self._plan.chunks[chunk].ends

    def return_chunk(self, chunk: int, results: Tensor) -> None:  # noqa: D102
        splits, order, in_flight = self._plan.chunks[chunk], self._plan.received, self._in_flight

        def start(results: Tensor) -> Tensor:
            in_flight.to_tokens(chunk, results.index_select(0, order.by_sender[chunk]))
            return _placeholder(sum(splits.sent), results)

        def wait_for_gradients(_: Tensor) -> Tensor:
            return in_flight.wait(chunk).index_select(0, order.by_expert[chunk])

        self._results.append(with_backward(start, wait_for_gradients, results))

    def combine(self) -> Tensor:  # noqa: D102
        combined: Tensor = _Combine.apply(self._in_flight, self._weights, *self._results)
        return combined


class _ExpertExchanges:
    """The exchanges in flight of a forward, later of its backward; at most one per chunk at a time."""

    def __init__(self, link: Link, plan: DispatchPlan, spans: LayerSpans) -> None:
        self.plan = plan
        self._link, self._spans = link, spans
        stops = list(accumulate((sum(splits.sent) for splits in plan.chunks), initial=0))
        self.slices = [slice(start, stop) for start, stop in pairwise(stops)]  # of each chunk, in all rows sent
        self._of_tokens: Tensor | None = None
        self._receiving: dict[int, tuple[Tensor, Wait]] = {}

    def to_experts(self, chunk: int, rows: Tensor, *, backward: bool = False) -> None:
        """Start to send ``[rows sent, H]`` and to receive ``[rows received, H]``."""
        splits = self.plan.chunks[chunk]
        out = rows.new_empty(sum(splits.received), rows.size(1))
        wait = self._link.start(out, rows, splits.received, splits.sent)
        name = "combine" if backward else "dispatch"
        self._receiving[chunk] = out, self._spans.travelling(name, chunk, wait, backward=backward)

    def to_tokens(self, chunk: int, rows: Tensor, *, backward: bool = False) -> None:
        """Start to send ``[rows received, H]`` and to receive ``[rows sent, H]`` into the chunk's slice of all rows."""
        splits = self.plan.chunks[chunk]
        if self._of_tokens is None:
            self._of_tokens = rows.new_empty(self.slices[-1].stop, rows.size(1))
        out = self._of_tokens[self.slices[chunk]]
        wait = self._link.start(out, rows, splits.sent, splits.received)
        name = "dispatch" if backward else "combine"
        self._receiving[chunk] = out, self._spans.travelling(name, chunk, wait, backward=backward)

    def wait(self, chunk: int) -> Tensor:
        """Wait for the rows of a chunk."""
        give_turn()
        out, wait = self._receiving.pop(chunk)
        wait()
        return out

    def wait_all(self) -> Tensor:
        """Wait for the rows of all tokens ``[S, H]``."""
        give_turn()
        for _, wait in self._receiving.values():  # in the order in which they were started
            wait()
        self._receiving.clear()
        of_tokens, self._of_tokens = self._of_tokens, None
        assert of_tokens is not None
        return of_tokens


def _placeholder(rows: int, like: Tensor) -> Tensor:
    """``[rows, H]`` that connects autograd nodes; :class:`_ExpertExchanges` has the rows themselves."""
    return like.new_zeros(()).expand(rows, like.size(1))


class _Combine(torch.autograd.Function):
    """Wait for the results of all chunks, and sum each token's results with its weights."""

    @staticmethod
    def forward(ctx: Any, in_flight: _ExpertExchanges, weights: Tensor, *results: Tensor) -> Tensor:
        rows = in_flight.wait_all()
        ctx.in_flight = in_flight
        ctx.save_for_backward(rows, weights)
        return permute.weighted_sums(rows, weights, in_flight.plan.routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        in_flight: _ExpertExchanges = ctx.in_flight
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = permute.weighted_sum_gradients(gradient, rows, weights, in_flight.plan.routes)
        chunks = in_flight.plan.chunks
        if any(ctx.needs_input_grad[2:]):
            for chunk in reversed(range(len(chunks))):  # autograd waits for the last chunk first
                in_flight.to_experts(chunk, of_rows[in_flight.slices[chunk]], backward=True)
        return None, of_weights, *(_placeholder(sum(splits.sent), of_rows) for splits in chunks)


class TPTokenDispatcher:
    """A :class:`omnitrain.ops.experts.Dispatcher` that passes this rank's slice of the tokens to another dispatcher.

    The ranks of ``group`` hold the same tokens. The gradients of replicated tensors are partial on each rank and sum
    over ``group``, as everywhere in tensor parallelism.
    """

    def __init__(self, inner: Dispatcher, group: dist.ProcessGroup) -> None:
        self.inner, self._group = inner, group

    @property
    def bytes_sent(self) -> int:  # noqa: D102
        return self.inner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, number: int) -> None:
        self.inner.bytes_sent = number

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> Any:  # noqa: D102
        return self.inner.plan(top_k_index[self._local_slice(len(top_k_index))], num_experts, spans)

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: Any, spans: LayerSpans) -> DispatchHandle:  # noqa: D102
        local = self._local_slice(len(tokens))
        handle = self.inner.dispatch(tokens[local], weights[local], plan, spans)
        return _TokenSliceHandle(handle, self._lengths(len(tokens)), self._group)

    def _lengths(self, num_tokens: int) -> list[int]:
        """The number of tokens of each rank."""
        each, left = divmod(num_tokens, self._group.size())
        return [each + (rank < left) for rank in range(self._group.size())]

    def _local_slice(self, num_tokens: int) -> slice:
        stops = list(accumulate(self._lengths(num_tokens), initial=0))
        return slice(*stops[self._group.rank() :][:2])


class _TokenSliceHandle:
    def __init__(self, handle: DispatchHandle, lengths: list[int], group: dist.ProcessGroup) -> None:
        self.ranges = handle.ranges
        self.wait_chunk, self.return_chunk = handle.wait_chunk, handle.return_chunk
        self._handle, self._lengths, self._group = handle, lengths, group

    def combine(self) -> Tensor:
        return gather_rows(self._handle.combine(), self._lengths, self._group)
