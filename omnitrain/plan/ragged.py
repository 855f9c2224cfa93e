"""Parts of different lengths, end to end in one array."""

from __future__ import annotations

import numpy as np


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges ``start .. start + length - 1``.

    Args:
        starts: ``[n]`` int64.
        lengths: ``[n]`` int64.
    """
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
