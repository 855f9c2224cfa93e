"""Parts of different lengths, end to end in one array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def runs_within(sizes: Iterable[int], most: int | None) -> list[int]:
    """Cut items into as few runs of at most ``most`` in size (larger items alone) as possible; return their lengths."""
    runs: list[int] = []
    room = 0
    for size in sizes:
        if not runs or (most is not None and size > room):
            runs.append(0)
            room = most or 0
        runs[-1] += 1
        room -= size
    return runs


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges ``start .. start + length - 1``; both arguments are ``[n]`` int64."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
