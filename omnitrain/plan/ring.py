"""Ring attention, planned: what of a packed row a rank attends to alone, and which blocks meet around the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Run = tuple[int, int]  # tokens from the first to before the second

FULL, CAUSAL, MASKED = "full", "causal", "masked"


@dataclass(frozen=True)
class Section:
    """Neighbouring tokens of one rank.

    Attributes:
        start: first token.
        stop: after the last.
        segment: number of the segment whose other tokens are on other ranks; None: whole segments.
    """

    start: int
    stop: int
    segment: int | None

    @property
    def length(self) -> int:
        """In tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """Queries and keys of one segment that may see each other.

    Attributes:
        queries: token numbers.
        keys: token numbers.
        kind: ``full``: all queries see all keys; ``causal``: queries are the keys, each sees itself and those before;
            ``masked``: the mask has to be asked.
    """

    queries: Run
    keys: Run
    kind: str


def sections_of(runs: Sequence[Run], borders: Sequence[int]) -> tuple[Section, ...]:
    """A rank's tokens, cut into whole segments, which need no other rank, and pieces of those that do.

    Args:
        runs: the rank's tokens, ascending.
        borders: ``(0, ..., T)``, where the segments of the row begin and end.

    Returns:
        Ascending; whole segments that are neighbours make one section.
    """
    sections: list[Section] = []
    for start, stop in _merged(runs):
        for segment, (first, end) in enumerate(pairwise(borders)):
            if max(start, first) >= min(stop, end):
                continue
            is_whole = start <= first and end <= stop
            if is_whole and sections and sections[-1].segment is None and sections[-1].stop == first:
                sections[-1] = Section(sections[-1].start, end, None)
            else:
                sections.append(Section(max(start, first), min(stop, end), None if is_whole else segment))
    return tuple(sections)


def block_between(queries: Run, keys: Run, *, causal: bool, window: int | None) -> Block | None:
    """What two runs of one segment see of each other under a mask by distance; None: nothing.

    Keys that no query sees, and queries that see no key, are left out at the ends.

    Args:
        queries: token numbers.
        keys: token numbers.
        causal: a token sees none after it.
        window: causal, too: it sees only so many, itself included.
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


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Runs of at least one token, those that touch made one."""
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged
