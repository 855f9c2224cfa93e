"""The order of training data: a pure function of ``(seed, global index)``."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

Draw = tuple[int, int, int]  # global index, source, row


class SampleOrder:
    """Which row of which source is the ``index``-th of the run. Endless: each source is reshuffled every epoch.

    Draw ``k`` of a source is due at time ``(k + phase) / share``, and draws come in order of their times: so every
    source gets its share of any stretch, and where the order stands at an index follows without replaying it.

    A run with ``slots`` packers deals this order out in blocks of one draw per slot: slot ``j`` has the indices ``j``,
    ``j + slots``, ``j + 2 * slots``, ... Which slot begins is drawn by lot for every block, lest sources that take
    turns at the same beat as slots go each to a slot of its own::

        due        a b a b a b a b      two sources of one weight
        two slots  0 1 1 0 1 0 0 1      slot of each; without the lots, slot 0 would never see b
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int, slots: int = 1) -> None:
        """``lengths``: rows per source; ``weights``: relative shares of the draws."""
        self.lengths = tuple(lengths)
        self.slots = slots
        self.shares = tuple(weight / sum(weights) for weight in weights)
        self.seed = seed
        # Spread, lest sources of one weight all be due at once.
        self._phases = tuple((source + 0.5) / len(lengths) for source in range(len(lengths)))
        self._permutations: list[dict[int, np.ndarray]] = [{} for _ in lengths]  # per source: epoch -> rows

    def __getitem__(self, index: int) -> Draw:
        """The draw of one global index."""
        return next(self.draws(index))

    def draws(self, start: int = 0) -> Iterator[Draw]:
        """``(index, source, row)`` for index ``start``, ``start + slots``, ...: all draws of a slot from there on."""
        index, place = start, self._place(start)
        for due, source, count in self._due_from(place):
            if due == place:
                yield index, source, self._row(source, count)
                index += self.slots
                place = self._place(index)

    def _place(self, index: int) -> int:
        """Where in the order of due times the draw of a global index is."""
        block, slot = divmod(index, self.slots)
        lot = hashlib.blake2b(f"{self.seed} {block}".encode(), digest_size=8).digest()
        return block * self.slots + (slot + int.from_bytes(lot, "little")) % self.slots

    def _due_from(self, start: int) -> Iterator[tuple[int, int, int]]:
        """``(place, source, draw of that source)`` for place ``start``, ``start + 1``, ... in order of due times."""
        begin = start - len(self.lengths) - 1  # early enough that fewer than `start` draws were due before
        drawn = [self._due_before(begin, source) for source in range(len(self.lengths))]
        due = [(self._time(source, count), source, count) for source, count in enumerate(drawn)]
        heapq.heapify(due)
        place = sum(drawn)
        while True:
            _, source, count = due[0]
            heapq.heapreplace(due, (self._time(source, count + 1), source, count + 1))
            if place >= start:
                yield place, source, count
            place += 1

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
