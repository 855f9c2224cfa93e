"""Radix sort by several non-negative integer keys; numpy has one for 16-bit keys only."""

from __future__ import annotations

import numpy as np

_BITS = 16


def stable_order(*keys: np.ndarray) -> np.ndarray:
    """Return the indices that sort by ``keys`` ``[n]`` int64, not negative: the first, the second, ..., position."""
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if np.prod(sizes, dtype=object) > np.iinfo(np.int64).max:
        return np.lexsort(keys[::-1])
    word = np.zeros(len(keys[0]), dtype=np.int64)
    for key, size in zip(keys, sizes, strict=True):
        word = word * size + key
    order = np.argsort(word.astype(np.uint16), kind="stable")
    for shift in range(_BITS, int(word.max(initial=0)).bit_length(), _BITS):
        digits = (word >> shift).astype(np.uint16)[order]
        order = order[np.argsort(digits, kind="stable")]
    return order
