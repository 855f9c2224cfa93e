"""Attention segment by segment: the sequence is cut between its segments, so they cannot influence each other.

Neighbouring segments of about equal length (packs are sorted by length) share one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from omnitrain.ops.attention.spec import AttentionCall, MaskSpec
from omnitrain.ops.collectives import with_backward
from omnitrain.ops.cpu.short_attention import ShortKeys, ShortSegments, attend_short, short_keys, short_segments
from omnitrain.ops.cpu.unread_rows import ReadRows
from omnitrain.ops.host_values import to_device

# A causal segment may be padded at its end to this multiple of its length, to share a call with longer ones.
CAUSAL_SLACK = 1.25
SHORT_SLACK = 1.5  # for segments with explicit scores: there padding costs less, and a call more


@dataclass(frozen=True)
class Segment:
    """One segment; ``mask`` ``[1, 1 or heads, length, length]``; None: the mask is causal or full."""

    start: int
    length: int
    causal: bool
    mask: Tensor | None = None

    @property
    def kind(self) -> tuple[bool, bool]:
        """Segments of one kind may share a call."""
        return self.causal, self.mask is None


@dataclass(frozen=True)
class Batch:
    """Neighbouring segments that share one call, padded at their ends to the longest one's ``length``."""

    segments: tuple[Segment, ...]  # the segments, in order of the sequence
    length: int  # length of the longest segment
    causal: bool  # whether no token sees a later one
    mask: Tensor | None  # [1 or segments, 1 or heads, length, length]; None: the mask is causal or full
    padded_tokens: Tensor | None  # [segments * length], the token at each padded position; None: no padding
    real_places: Tensor | None  # [tokens], the padded position of each token; None: no padding

    @property
    def tokens(self) -> int:
        """Number of tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    def fold(self, x_THD: Tensor) -> Tensor:
        """``[tokens, heads, dim] -> [segments, heads, length, dim]``."""
        real, padded = self.real_places, self.padded_tokens
        if real is not None and padded is not None:
            # The backward selects rows, where autograd would add row by row. Padding has no gradient: its output is
            # dropped, and no real token attends to it.
            x_THD = with_backward(lambda x: x.index_select(0, padded), lambda grad: grad.index_select(0, real), x_THD)
        return x_THD.unflatten(0, (len(self.segments), self.length)).transpose(1, 2)

    def unfold(self, x_BHLD: Tensor) -> Tensor:
        """``[segments, heads, length, dim] -> [tokens, heads, dim]``."""
        x_THD, real = x_BHLD.transpose(1, 2).flatten(0, 1), self.real_places
        if real is None:
            return x_THD
        shape = x_THD.shape
        return with_backward(
            lambda x: x.index_select(0, real), lambda grad: grad.new_zeros(shape).index_copy_(0, real, grad), x_THD
        )

    def cut(self, bias: Tensor) -> Tensor:
        """``[1, heads, T, T] -> [segments, heads, length, length]``; all segments must have the same length."""
        spans = [slice(segment.start, segment.start + segment.length) for segment in self.segments]
        return torch.cat([bias[:, :, span, span] for span in spans])


# Query, key and value of a batch of segments -> [segments, heads, length, value width].
Kernel = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]


def attend_in_batches(call: AttentionCall, kernel: Kernel, *, short: int = 0) -> Tensor:
    """Run ``kernel`` for each batch of segments: ``[1, T, heads, value width]``.

    Causal neighbours with at most ``short`` tokens get explicit scores (:mod:`omnitrain.ops.cpu.short_attention`), only
    on CPU and if ``call`` has no feature but grouped heads.
    """
    slack = CAUSAL_SLACK if call.position_bias is None else 1.0
    parts = _parts_of(call, slack, short)
    # Tokens first, as projections lay them out, so gradients of the parts are concatenated in that layout, too.
    query, key, value = (states[0].transpose(0, 1) for states in (call.query, call.key, call.value))
    if len(parts) == 1 and isinstance(parts[0], ShortSegments):  # nothing to split or concatenate
        return attend_short(query, key, value, parts[0], call.scaling)[None]
    split = (states.split([part.tokens for part in parts]) for states in (query, key, value))
    outputs = [
        attend_short(q, k, v, part, call.scaling)
        if isinstance(part, ShortSegments)
        else part.unfold(kernel(part.fold(q), part.fold(k), part.fold(v), part))
        for part, q, k, v in zip(parts, *split, strict=True)
    ]
    return torch.cat(outputs)[None]


def batches_of(mask: MaskSpec, slack: float, device: torch.device) -> tuple[Batch, ...]:
    """Return the batches of a sequence, computed once per mask, with index tensors and masks on ``device``.

    In a batch of causal segments, the longest is at most ``slack`` times the shortest; other batches have segments of
    equal length.
    """

    def made() -> tuple[Batch, ...]:
        segments = (_segment(mask, start, stop, device) for start, stop in pairwise(mask.offsets))
        return tuple(_batch(tuple(group), mask.window, device) for group in _grouped(segments, slack))

    return mask.remember((slack, device), made)


def _parts_of(call: AttentionCall, slack: float, short: int) -> tuple[Batch | ShortSegments, ...]:
    mask, device = call.mask, call.query.device
    if not short:
        return batches_of(mask, slack, device)
    heads, key_heads = call.query.size(1), call.key.size(1)
    laid_out = (slack, short, key_heads, device)
    runs = mask.remember(laid_out, lambda: tuple(_make_runs(mask, *laid_out)))
    return mask.remember((laid_out, heads, call.read), lambda: tuple(_make_parts(runs, heads, call.read)))


def _make_runs(
    mask: MaskSpec, slack: float, short: int, key_heads: int, device: torch.device
) -> Iterator[Batch | ShortKeys]:
    segments = [_segment(mask, start, stop, device) for start, stop in pairwise(mask.offsets)]
    for is_short, run in groupby(segments, lambda segment: segment.causal and segment.length <= short):
        neighbours = list(run)
        if is_short and len(neighbours) > 1:  # a single segment stays bit-identical to plain transformers
            groups = _grouped(neighbours, SHORT_SLACK)
            yield short_keys([[segment.length for segment in group] for group in groups], key_heads)
        else:
            yield from (_batch(tuple(group), mask.window, device) for group in _grouped(neighbours, slack))


def _make_parts(
    runs: Sequence[Batch | ShortKeys], heads: int, read: ReadRows | None
) -> Iterator[Batch | ShortSegments]:
    flags, start = None if read is None else read.flags, 0
    for run in runs:
        stop = start + run.tokens
        if isinstance(run, ShortKeys):
            yield short_segments(run, heads, None if flags is None else flags[start:stop])
        else:
            yield run
        start = stop


def _grouped(segments: Iterable[Segment], slack: float) -> list[list[Segment]]:
    """Neighbours that share a call."""
    groups: list[list[Segment]] = []
    shortest = longest = 0
    for segment in segments:
        shortest, longest = min(shortest, segment.length), max(longest, segment.length)
        if groups and segment.kind == groups[-1][0].kind and longest <= (slack if segment.causal else 1.0) * shortest:
            groups[-1].append(segment)
        else:
            groups.append([segment])
            shortest = longest = segment.length
    return groups


def _segment(mask: MaskSpec, start: int, stop: int, device: torch.device) -> Segment:
    length = stop - start
    if mask.general is None:
        return Segment(start, length, mask.causal)
    seen = mask.block_mask((start, stop), (start, stop), device)
    if seen.dtype == torch.bool and seen.size(1) == 1:  # such as text without images in a model with image blocks
        if bool(seen.all()):
            return Segment(start, length, causal=False)
        if torch.equal(seen[0, 0], _window(length, length, device)):
            return Segment(start, length, causal=True)
    return Segment(start, length, False, seen)


def _batch(segments: tuple[Segment, ...], window: int | None, device: torch.device) -> Batch:
    lengths = [segment.length for segment in segments]
    longest, causal = max(lengths), segments[0].causal
    mask = None if segments[0].mask is None else torch.cat([s.mask for s in segments if s.mask is not None])
    if window is not None and longest > window:
        causal, mask = False, _window(longest, window, device)[None, None]
    if len(set(lengths)) == 1:
        return Batch(segments, longest, causal, mask, None, None)
    sizes = torch.tensor(lengths)[:, None]
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(longest)[None]
    tokens = starts + place.minimum(sizes - 1)  # padding repeats the last token; no real token attends to it
    real = (place < sizes).flatten().nonzero().flatten()
    return Batch(segments, longest, causal, mask, to_device(tokens.flatten(), device), to_device(real, device))


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """``[length, length]``: each token sees itself and the ``window - 1`` before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
