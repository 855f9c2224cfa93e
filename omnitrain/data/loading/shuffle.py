"""Shuffle the rows of a source without a permutation in memory: each row is computed from its position.

A Feistel network over the grid ``a x b`` permutes its ``a * b`` cells, for any function of a round (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). The grid is the smallest about square one with as many cells as there
are rows; a result that is not below the number of rows goes through the network again until it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

_ROUNDS = 12  # with 8, the permutations of five rows are not equally likely
_BLOCKS_AT_A_TIME = 4


def shuffled(positions: np.ndarray, length: int, key: str) -> np.ndarray:
    """Return the rows at ``positions`` (both ``[n]`` int64) of a permutation of ``length`` rows that ``key`` names."""
    height = math.isqrt(length - 1) + 1 if length > 1 else 1
    width = -(-length // height)
    digests = b"".join(hashlib.blake2b(f"{half} {key}".encode(), digest_size=48).digest() for half in range(2))
    a, b, keys = np.uint64(height), np.uint64(width), np.frombuffer(digests, dtype="<u8").astype(np.uint64)[:_ROUNDS]
    rows = _permuted(positions.astype(np.uint64), a, b, keys)
    outside = np.flatnonzero(rows >= length)
    while len(outside):
        rows[outside] = _permuted(rows[outside], a, b, keys)
        outside = outside[rows[outside] >= length]
    return rows.astype(np.int64)


def shuffled_in_blocks(positions: np.ndarray, blocks: Sequence[int], key: str) -> np.ndarray:
    """Return the rows at ``positions`` of a permutation that keeps few blocks of rows in use at a time.

    It shuffles the ``blocks`` (rows of each), and then the rows of every four that follow each other; else as
    :func:`shuffled`.
    """
    if len(blocks) <= _BLOCKS_AT_A_TIME:
        return shuffled(positions, sum(blocks), key)
    order = shuffled(np.arange(len(blocks)), len(blocks), key)
    lengths = np.asarray(blocks, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.cumsum(lengths[order])  # in the new order
    last = np.minimum(np.arange(_BLOCKS_AT_A_TIME, len(blocks) + _BLOCKS_AT_A_TIME, _BLOCKS_AT_A_TIME), len(blocks)) - 1
    window_ends = ends[last]
    rows = np.empty(len(positions), dtype=np.int64)
    window_of = np.searchsorted(window_ends, positions, side="right")
    for window in np.unique(window_of):
        found = np.flatnonzero(window_of == window)
        begin = int(window_ends[window - 1]) if window else 0
        within = shuffled(positions[found] - begin, int(window_ends[window]) - begin, f"{key} {window}") + begin
        block = np.searchsorted(ends, within, side="right")
        rows[found] = starts[order[block]] + within - (ends[block] - lengths[order[block]])
    return rows


def _permuted(cells: np.ndarray, height: np.uint64, width: np.uint64, keys: np.ndarray) -> np.ndarray:
    top, side = np.divmod(cells, width)
    for of_top, of_side in zip(keys[::2], keys[1::2], strict=True):
        top = (top + _mixed(side, of_top) % height) % height
        side = (side + _mixed(top, of_side) % width) % width
    return np.asarray(top * width + side)


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return 64 bits that look random, a function of each value and the key."""
    bits = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(32)
    bits *= np.uint64(0xD6E8FEB86659FD93)
    return bits ^ (bits >> np.uint64(29))
