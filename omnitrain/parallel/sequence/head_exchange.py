"""The all-to-alls of Ulysses: exchange some tokens of all heads for all tokens of some heads, and the inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import UserError
from omnitrain.ops.collectives import gathered_objects, with_backward
from omnitrain.parallel.state import get_parallel_state

# The heads (start, stop) of each rank. Neighbouring ranks may share heads.
HeadSpans = Sequence[tuple[int, int]]
# Waits for an exchange in flight and returns its result.
Arrival = Callable[[], tuple[Tensor, ...]]


def gather_seq_scatter_heads(
    x: Tensor,
    seq_dim: int,
    head_dim: int,
    group: dist.ProcessGroup | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Gather all tokens of this rank's heads from the ranks' tokens of all heads, for a custom attention under Ulysses.

    One differentiable all-to-all; so is the backward. All ranks of the group must call it.

    With 2 ranks, 4 heads and 3 tokens: rank 0 has the tokens ``a b``, rank 1 has ``c``::

        rank 0   a: 0 1 2 3   b: 0 1 2 3            a: 0 1   b: 0 1   c: 0 1
        rank 1   c: 0 1 2 3                   ->    a: 2 3   b: 2 3   c: 2 3

    Args:
        x: any shape and dtype; ``size(seq_dim)`` may differ between ranks, all other sizes must be equal.
        seq_dim: dim of the tokens.
        head_dim: dim of the heads, or of heads and their widths flattened.
        group: the ranks that share the sequence; None: the ``sp_group`` of the parallel state.
        lengths: number of tokens of each rank; None: gathered by a small collective.

    Returns:
        ``x`` with all tokens along ``seq_dim``, in order of the ranks, and this rank's heads along ``head_dim``.

    Raises:
        UserError: the ranks do not divide the heads. The message lists the numbers of ranks that do.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    group = get_parallel_state().sp_group if group is None else group
    x_THW = _tokens_first(x, seq_dim, head_dim)
    lengths = gathered_objects(len(x_THW), group) if lengths is None else lengths
    (gathered,) = tokens_to_heads([x_THW], [equal_spans(x_THW.size(1), group.size())], lengths, group)
    return _as_before(gathered, x, seq_dim, head_dim)


def gather_heads_scatter_seq(
    x: Tensor,
    head_dim: int,
    seq_dim: int,
    group: dist.ProcessGroup | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Invert :func:`gather_seq_scatter_heads`: gather all heads of this rank's tokens.

    One differentiable all-to-all; so is the backward. All ranks of the group must call it.

    Args:
        x: any shape and dtype; all sizes must be equal on all ranks.
        head_dim: dim of this rank's heads; all ranks have equally many.
        seq_dim: dim of the tokens.
        group: the ranks that share the sequence; None: the ``sp_group`` of the parallel state.
        lengths: number of tokens that each rank gets; None: nearly equal, with one more on the first ranks.

    Returns:
        ``x`` with this rank's tokens along ``seq_dim``, and all heads along ``head_dim``, in order of the ranks.

    Raises:
        UserError: ``lengths`` do not add up to the tokens.
    """
    group = get_parallel_state().sp_group if group is None else group
    x_THW = _tokens_first(x, seq_dim, head_dim)
    ranks, num_tokens = group.size(), len(x_THW)
    if lengths is None:
        lengths = [num_tokens // ranks + (rank < num_tokens % ranks) for rank in range(ranks)]
    if len(lengths) != ranks or sum(lengths) != num_tokens:
        raise UserError(
            f"lengths: found {list(lengths)}; expected {ranks} numbers that add up to {num_tokens}, the tokens of x"
        )
    spans = equal_spans(x_THW.size(1) * ranks, ranks)
    (scattered,) = heads_to_tokens([x_THW], [spans], lengths, group)
    return _as_before(scattered, x, seq_dim, head_dim)


def equal_spans(num_heads: int, ranks: int) -> HeadSpans:
    """Return the heads of each rank, equally many; a UserError lists the numbers of ranks that divide them."""
    if num_heads % ranks:
        allowed = ", ".join(str(degree) for degree in range(1, num_heads + 1) if num_heads % degree == 0)
        raise UserError(f"{ranks} ranks cannot share {num_heads} heads equally; {allowed} can")
    share = num_heads // ranks
    return [(rank * share, (rank + 1) * share) for rank in range(ranks)]


def tokens_to_heads(
    tensors: Sequence[Tensor], spans: Sequence[HeadSpans], lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Gather all tokens of this rank's heads of several tensors, by one differentiable all-to-all.

    ``[local tokens, heads, width] -> [all tokens, local heads, width]`` for each. ``spans`` has, per tensor, the heads
    of each rank; several ranks may get the same head, whose gradients are summed in fp32.
    """
    return with_backward(
        lambda *own: start_gather(own, spans, lengths, group)(),
        lambda *gradients: start_scatter(gradients, spans, lengths, group)(),
        *tensors,
    )


def heads_to_tokens(
    tensors: Sequence[Tensor], spans: Sequence[HeadSpans], lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Gather this rank's tokens of all heads: the inverse of :func:`tokens_to_heads`, by one differentiable all-to-all.

    ``[all tokens, local heads, width] -> [local tokens, heads, width]`` per tensor; no head belongs to two ranks.
    """
    return with_backward(
        lambda *own: start_scatter(own, spans, lengths, group)(),
        lambda *gradients: start_gather(gradients, spans, lengths, group)(),
        *tensors,
    )


def start_gather(
    tensors: Sequence[Tensor], spans: Sequence[HeadSpans], lengths: Sequence[int], group: dist.ProcessGroup
) -> Arrival:
    """Start :func:`tokens_to_heads` without a graph; call the returned function once for the result.

    Rank r receives ``[local tokens, its heads of all tensors concatenated]``, so received tokens need no reordering.
    """
    own, own_tokens = dist.get_rank(group), len(tensors[0])
    parts = _of_one_dtype(tensors)
    widths = _widths(parts, spans)
    sent = [own_tokens * sum(of_rank) for of_rank in widths]
    outgoing = parts[0].new_empty(sum(sent))
    for rank, to_rank in enumerate(outgoing.split(sent)):
        pieces = [part[:, slice(*of_ranks[rank])].flatten(1) for part, of_ranks in zip(parts, spans, strict=True)]
        torch.cat(pieces, dim=1, out=to_rank.view(own_tokens, sum(widths[rank])))
    incoming = outgoing.new_empty(sum(lengths), sum(widths[own]))
    received = [number * incoming.size(1) for number in lengths]
    work = dist.all_to_all_single(incoming.view(-1), outgoing, received, sent, group=group, async_op=True)

    def arrived() -> tuple[Tensor, ...]:
        work.wait()
        return tuple(
            _of_dtype(columns.unflatten(1, (-1, part.size(2))), tensor)
            for columns, part, tensor in zip(incoming.split(widths[own], dim=1), parts, tensors, strict=True)
        )

    return arrived


def start_scatter(
    tensors: Sequence[Tensor], spans: Sequence[HeadSpans], lengths: Sequence[int], group: dist.ProcessGroup
) -> Arrival:
    """Start :func:`heads_to_tokens` without a graph; call the returned function once for the result.

    The transpose of :func:`start_gather`: it sums heads that several ranks have.
    """
    own = dist.get_rank(group)
    parts = _of_one_dtype(tensors)
    widths = _widths(parts, spans)
    columns = [part.flatten(1) for part in parts]
    outgoing = (columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)).contiguous()
    received = [lengths[own] * sum(of_rank) for of_rank in widths]
    incoming = outgoing.new_empty(sum(received))
    sent = [number * outgoing.size(1) for number in lengths]
    work = dist.all_to_all_single(incoming, outgoing.view(-1), received, sent, group=group, async_op=True)

    def arrived() -> tuple[Tensor, ...]:
        work.wait()
        of_ranks = [
            from_rank.view(lengths[own], sum(of_rank)).split(of_rank, dim=1)
            for from_rank, of_rank in zip(incoming.split(received), widths, strict=True)
        ]
        return tuple(
            _put_together(
                [_of_dtype(from_rank[index].unflatten(1, (-1, part.size(2))), tensor) for from_rank in of_ranks],
                spans[index],
            )
            for index, (part, tensor) in enumerate(zip(parts, tensors, strict=True))
        )

    return arrived


def _put_together(pieces: Sequence[Tensor], spans: HeadSpans) -> Tensor:
    """``[local tokens, heads, width]`` from the heads of each rank; heads of several ranks are summed in fp32."""
    if all(stop == start for (_, stop), (start, _) in pairwise(spans)):
        return torch.cat(list(pieces), dim=1)
    first = pieces[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    total = first.new_zeros(len(first), spans[-1][1], first.size(2), dtype=dtype)
    for piece, span in zip(pieces, spans, strict=True):
        total[:, slice(*span)] += piece
    return total.to(first.dtype)


def _widths(parts: Sequence[Tensor], spans: Sequence[HeadSpans]) -> list[list[int]]:
    """The number of elements of a token, per rank and tensor."""
    return [
        [(stop - start) * part.size(2) for part, (start, stop) in zip(parts, of_rank, strict=True)]
        for of_rank in zip(*spans, strict=True)
    ]


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors unchanged if they have one dtype, otherwise as bytes."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return list(tensors)
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def _of_dtype(part: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`_of_one_dtype`; bytes are copied, because they may start at an unaligned address."""
    return part if part.dtype == like.dtype else part.clone(memory_format=torch.contiguous_format).view(like.dtype)


def _tokens_first(x: Tensor, seq_dim: int, head_dim: int) -> Tensor:
    """``[tokens, heads, all other dims]``."""
    return x.movedim((seq_dim, head_dim), (0, 1)).flatten(2) if x.ndim > 2 else x.movedim(seq_dim, 0).unsqueeze(2)


def _as_before(x_THW: Tensor, like: Tensor, seq_dim: int, head_dim: int) -> Tensor:
    """The inverse of :func:`_tokens_first`, for other numbers of tokens and heads."""
    others = like.movedim((seq_dim, head_dim), (0, 1)).shape[2:]
    return x_THW.reshape(*x_THW.shape[:2], *others).movedim((0, 1), (seq_dim, head_dim))
