"""Plan ring attention: the tokens that a rank attends to alone, and the blocks that travel around the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Run = tuple[int, int]  # tokens [start, stop)

FULL, CAUSAL, MASKED = "full", "causal", "masked"


@dataclass(frozen=True)
class SlicePart:
    """Adjacent tokens on one rank."""

    start: int  # first token
    stop: int  # one past the last token
    # index of the segment whose other tokens are on other ranks. None: the part is whole segments
    segment: int | None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """Queries and keys of one segment that may attend to each other."""

    queries: Run  # run of token indices
    keys: Run  # run of token indices
    # ``full``: all queries attend to all keys. ``causal``: the queries are the keys, and each attends to itself and the
    # keys before it. ``masked``: the mask decides for each pair
    kind: str


def parts_of_slice(runs: Sequence[Run], cu_seqlens: Sequence[int]) -> tuple[SlicePart, ...]:
    """Divide a rank's tokens, as runs, into whole segments, which need no other rank, and slices of segments that do.

    Parts ascend, and adjacent whole segments form one. ``cu_seqlens``: ``(0, ..., T)``, offsets of the segments.
    """
    parts: list[SlicePart] = []
    for start, stop in _merged(runs):
        for segment, (first, end) in enumerate(pairwise(cu_seqlens)):
            if max(start, first) >= min(stop, end):
                continue
            is_whole = start <= first and end <= stop
            if is_whole and parts and parts[-1].segment is None and parts[-1].stop == first:
                parts[-1] = SlicePart(parts[-1].start, end, None)
            else:
                parts.append(SlicePart(max(start, first), min(stop, end), None if is_whole else segment))
    return tuple(parts)


def block_between(queries: Run, keys: Run, *, causal: bool, window: int | None) -> Block | None:
    """Return the block in which two runs of one segment attend to each other under a mask by distance, or None.

    The block is trimmed at its ends: no keys without a query, and no queries without a key.
    """
    (first, end), (first_key, end_key) = queries, keys
    if causal:
        end_key, first = min(end_key, end), max(first, first_key)
    if window is not None:
        first_key, end = max(first_key, first - window + 1), min(end, end_key - 1 + window)
    if first >= end or first_key >= end_key:
        return None
    kind = MASKED
    if window is None or end - 1 - first_key < window:
        if not causal or end_key - 1 <= first:
            kind = FULL
        elif (first, end) == (first_key, end_key):
            kind = CAUSAL
    return Block((first, end), (first_key, end_key), kind)


def seen_before_and_after(block: Block, window: int | None) -> tuple[int, int]:
    """Return how many keys before and after its own position a query of a block by distance sees; -1: all of them.

    Flash kernels count positions from the end: the last query and the last key of a block have the same position.
    """
    if block.kind == FULL:
        return -1, -1
    if block.kind == CAUSAL:
        return -1, 0
    after = block.queries[1] - block.keys[1]
    return -1 if window is None else window - 1 - after, after


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Drop empty runs and merge adjacent ones."""
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged
