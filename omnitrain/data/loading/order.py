"""The order of training data: a pure function of ``(seed, global index)``, in memory that does not grow with the data.

Each slot draws from all sources, and slot ``j`` of ``n`` draws the rows at the positions ``j``, ``j + n``,
``j + 2 * n``, ... of each source's shuffled rows, so that no two slots draw the same row in an epoch. Draw ``k`` of a
source in a slot has the time ``(k + phase) / share``, and the slot's draws are sorted by time. So each source gets its
share of any stretch, and the state at an index is computed without replaying the order.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from omnitrain.data.sources.stream import ENDLESS

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
    """Permute blocks of rows, then the rows of every four of them, so that few blocks are in use."""
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


Draw = tuple[int, int, int]  # global index, source, row

ORDER_VERSION = 3  # a run goes on only with the order that it began with
_DRAWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class SourceShare:
    """The rows of a source, and how often they are drawn."""

    name: str  # that no other source of the run has; with the seed, it decides the order of the rows
    length: int
    weights: tuple[float, ...] = (1.0,)  # relative share of the draws in each stage; 0: no draws
    epochs: float | None = None  # how often the rows are drawn; None: without end
    blocks: tuple[int, ...] = ()  # rows of each part that is read at once; empty: they are read one by one
    in_order: bool = False  # rows are drawn as they come, because the source can only be iterated

    def rows(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the rows at ``[n]`` int64 positions of the source's endless order, which is shuffled every epoch."""
        if self.in_order:
            return positions % self.length
        rows = np.empty_like(positions)
        epochs, within = np.divmod(positions, self.length)
        for epoch in np.unique(epochs):
            found, key = np.flatnonzero(epochs == epoch), f"{seed} {epoch} {self.name}"
            if self.blocks:
                rows[found] = shuffled_in_blocks(within[found], self.blocks, key)
            else:
                rows[found] = shuffled(within[found], self.length, key)
        return rows


class _Draws(NamedTuple):
    """Draws of a slot that follow each other."""

    before: np.ndarray  # [sources], draws of each source before the first of them
    sources: np.ndarray  # [n], source of each draw
    counts: np.ndarray  # [n], number from 0 of the draw among the draws of its source in this slot


class SampleOrder:
    """The order of all samples of a run. It ends when all sources have had their epochs.

    Index ``i`` is a draw of slot ``i % slots``. ``begun``: the indices at which a slot began the second and each later
    stage. ``mixes_epochs``: a pack may have rows of an epoch before all rows of the one before it are packed.
    """

    def __init__(
        self,
        sources: Sequence[SourceShare],
        seed: int,
        slots: int = 1,
        stage_steps: Sequence[int] = (),
        *,
        mixes_epochs: bool = False,
    ) -> None:
        """Define the order of ``slots`` packers. ``stage_steps``: steps before the second and each later stage."""
        self.mixes_epochs = mixes_epochs
        self.sources, self.seed, self.slots, self.stage_steps = tuple(sources), seed, slots, tuple(stage_steps)
        self.lengths = tuple(source.length for source in sources)
        weights = np.array([source.weights for source in sources], dtype=np.float64)
        self._shares = (weights / weights.sum(axis=0)).T  # [stages, sources]

    def draw(self, index: int, begun: Sequence[int] = ()) -> Draw:
        """Return the draw of one global index; IndexError: the sources end before it."""
        source, position = self._position(index, begun)
        return index, source, int(self.sources[source].rows(np.array([position]), self.seed)[0])

    def is_first(self, index: int, begun: Sequence[int] = ()) -> bool:
        """Return whether the row of a global index was in no draw before it: its source is in its first epoch."""
        source, position = self._position(index, begun)
        return position < self.lengths[source]

    def stage_of(self, step: int) -> int:
        """Return the number, from 0, of the stage in which a step (from 0) is."""
        return bisect_right(self.stage_steps, step)

    def first_needed(self, source: int, index: int, held: Sequence[int] = (), begun: Sequence[int] = ()) -> int:
        """Return the first position of a source that a slot may still draw, ``held`` ones again."""
        following = int(self._drawn(index, 0, begun).before[source]) * self.slots + index % self.slots
        again = (self._position(one, begun) for one in held)
        return min([following, *(position for drawn, position in again if drawn == source)])

    def draws(self, start: int = 0, begun: Sequence[int] = ()) -> Iterator[Draw]:
        """Yield ``(index, source, row)`` for index ``start``, ``start + slots``, ...: the next draws of a slot."""
        for indices, sources, positions in self._positions(start, begun):
            rows = np.empty_like(positions)
            for source in np.unique(sources):
                found = np.flatnonzero(sources == source)
                rows[found] = self.sources[source].rows(positions[found], self.seed)
            yield from zip(indices, sources.tolist(), rows.tolist(), strict=True)

    def epochs(self, start: int = 0, begun: Sequence[int] = ()) -> Iterator[tuple[int, int, int]]:
        """Yield ``(index, source, epoch)`` for the same indices as :meth:`draws`; epochs of a source count from 0."""
        lengths = np.array(self.lengths)
        for indices, sources, positions in self._positions(start, begun):
            yield from zip(indices, sources.tolist(), (positions // lengths[sources]).tolist(), strict=True)

    def _positions(self, start: int, begun: Sequence[int]) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
        """Yield indices of a slot from ``start`` on, their sources, and positions in these sources' endless orders."""
        slot, index = start % self.slots, start
        while True:
            end = next((later for later in begun if later > index), index + _DRAWS_AT_A_TIME * self.slots)
            size = min(_DRAWS_AT_A_TIME, (end - index) // self.slots)
            drawn = self._drawn(index, size, begun)
            if not len(drawn.sources):
                return
            indices = range(index, index + len(drawn.sources) * self.slots, self.slots)
            yield indices, drawn.sources, drawn.counts * self.slots + slot
            index = indices.stop

    def _position(self, index: int, begun: Sequence[int]) -> tuple[int, int]:
        """Return the source of an index, and the position in the endless order of that source's rows."""
        drawn = self._drawn(index, 1, begun)
        if not len(drawn.sources):
            raise IndexError(f"the sources end before sample {index}")
        return int(drawn.sources[0]), int(drawn.counts[0]) * self.slots + index % self.slots

    def _drawn(self, index: int, size: int, begun: Sequence[int]) -> _Draws:
        """Return up to ``size`` draws of a slot from ``index`` on, all in one stage."""
        slot, stage = index % self.slots, bisect_right(begun, index)
        borders = [slot, *begun[:stage], index]
        before = np.zeros(len(self.sources), dtype=np.int64)
        for earlier in range(stage):
            num_draws = (borders[earlier + 1] - borders[earlier]) // self.slots
            before = before + self._in_stage(earlier, slot, before, num_draws, 0).before
        drawn = self._in_stage(stage, slot, before, (index - borders[stage]) // self.slots, size)
        return drawn._replace(counts=drawn.counts + before[drawn.sources])

    def _in_stage(self, stage: int, slot: int, before: np.ndarray, start: int, size: int) -> _Draws:
        """Return draws number ``start`` to ``start + size`` of a slot in a stage, counted from the stage's begin."""
        shares, number = self._shares[stage], len(self.sources)
        # Different phases, so that neither sources of equal weight nor slots draw the same source at the same time.
        phases = ((np.arange(number) + 0.5) / number + slot / self.slots) % 1.0
        ends = [ENDLESS if one.epochs is None else int(one.epochs * one.length) for one in self.sources]
        left = np.maximum(-(-(np.array(ends) - slot) // self.slots), 0) - before
        times = _DrawTimes(shares, phases, np.where(shares > 0, left, 0))
        low = times.num_before(times.at(start - number - 1))
        high = times.num_before(times.at(start + size + number + 1))
        sources = np.repeat(np.arange(number), high - low)
        counts = np.concatenate([np.arange(first, last) for first, last in zip(low, high, strict=True)])
        order = np.lexsort((sources, times.of(sources, counts)))
        skipped, kept = np.split(order[: start + size - int(low.sum())], [start - int(low.sum())])
        return _Draws(low + np.bincount(sources[skipped], minlength=number), sources[kept], counts[kept])


@dataclass(frozen=True)
class _DrawTimes:
    """The times of the draws of all sources: draw ``k`` of one is at ``(k + phase) / share``; ``[sources]`` each."""

    shares: np.ndarray  # they add up to 1
    phases: np.ndarray  # in [0, 1)
    left: np.ndarray  # number of draws of each source; 0 for a share of 0

    def of(self, sources: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return np.asarray((counts + self.phases[sources]) / self.shares[sources])

    def at(self, number: int) -> float:
        """Return the time at which ``sum(min(left, time * share))`` is ``number``; infinite if it never is."""
        if number <= 0:
            return 0.0
        active = np.flatnonzero(self.left)
        ends = self.left[active] / self.shares[active]
        time, done, rate = 0.0, 0.0, float(self.shares[active].sum())
        for which in np.argsort(ends, kind="stable"):
            if done + (ends[which] - time) * rate >= number:
                return time + (number - done) / rate
            done, time = done + (ends[which] - time) * rate, float(ends[which])
            rate = max(rate - self.shares[active][which], 0.0)
        return float("inf")

    def num_before(self, time: float) -> np.ndarray:
        """Return ``[sources]``, the draws of each source with a smaller time, with the rounding of :meth:`of`."""
        if time == float("inf"):
            return self.left
        active = np.flatnonzero(self.left)
        guess = np.ceil(time * self.shares[active] - self.phases[active]).astype(np.int64)
        guess = np.clip(guess, 0, self.left[active])
        while (high := (guess > 0) & (self.of(active, guess - 1) >= time)).any():
            guess -= high
        while (low := (guess < self.left[active]) & (self.of(active, guess) < time)).any():
            guess += low
        number = np.zeros_like(self.left)
        number[active] = guess
        return number
