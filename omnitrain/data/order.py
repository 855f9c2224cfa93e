"""The order of training data: a pure function of ``(seed, global index)``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

Draw = tuple[int, int, int]  # global index, source, row


class SampleOrder:
    """Which row of which source is the ``index``-th of the run. Endless: each source is reshuffled every epoch.

    Draw ``k`` of a source is due at time ``(k + phase) / share``, and draws come in order of their times: so every
    source gets its share of any stretch, and where the order stands at an index follows without replaying it.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """``lengths``: rows per source; ``weights``: relative shares of the draws."""
        self.lengths = tuple(lengths)
        self.shares = tuple(weight / sum(weights) for weight in weights)
        self.seed = seed
        # Spread, lest sources of one weight all be due at once.
        self._phases = tuple((source + 0.5) / len(lengths) for source in range(len(lengths)))
        self._permutations: list[dict[int, np.ndarray]] = [{} for _ in lengths]  # per source: epoch -> rows

    def __getitem__(self, index: int) -> Draw:
        """The draw of one global index."""
        return next(self.draws(index))

    def draws(self, start: int = 0) -> Iterator[Draw]:
        """``(index, source, row)`` for index ``start``, ``start + 1``, ..."""
        begin = start - len(self.lengths) - 1  # early enough that fewer than `start` draws were due before
        drawn = [self._due_before(begin, source) for source in range(len(self.lengths))]
        due = [(self._time(source, count), source, count) for source, count in enumerate(drawn)]
        heapq.heapify(due)
        index = sum(drawn)
        while True:
            _, source, count = due[0]
            heapq.heapreplace(due, (self._time(source, count + 1), source, count + 1))
            if index >= start:
                yield index, source, self._row(source, count)
            index += 1

    def _time(self, source: int, count: int) -> float:
        return (count + self._phases[source]) / self.shares[source]

    def _due_before(self, time: float, source: int) -> int:
        """Draws of ``source`` whose time is less, exactly as :meth:`_time` rounds."""
        count = max(0, math.ceil(time * self.shares[source] - self._phases[source]))
        while count and self._time(source, count - 1) >= time:
            count -= 1
        while self._time(source, count) < time:
            count += 1
        return count

    def _row(self, source: int, count: int) -> int:
        epoch, position = divmod(count, self.lengths[source])
        known = self._permutations[source]
        if epoch not in known:
            if len(known) == 2:  # samples held back for packing may be of the epoch before
                del known[min(known)]
            known[epoch] = np.random.default_rng([self.seed, source, epoch]).permutation(self.lengths[source])
        return int(known[epoch][position])
