"""The first order of training data, with which the runs that began with it resume. New runs have that of ``order``.

It keeps a permutation of each source in memory.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from omnitrain.data.loading.order import Draw


class FirstOrder:
    """The source and row of each index of the run. Endless: each source is reshuffled every epoch.

    Draw ``k`` of a source has the time ``(k + phase) / share``, and draws are sorted by time. So each source gets its
    share of any stretch, and the state at an index can be computed without replaying the order.

    A run with ``slots`` packers divides this order into blocks of one draw per slot: slot ``j`` has the indices ``j``,
    ``j + slots``, ``j + 2 * slots``, ... The first slot of each block is random. Otherwise sources that alternate with
    the same period as the slots would each go to one slot::

        draw       a b a b a b a b      two sources of equal weight
        two slots  0 1 1 0 1 0 0 1      slot of each draw; without randomness slot 0 would never see b
    """

    mixes_epochs = True

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int, slots: int = 1) -> None:
        """Define the order.

        Args:
            lengths: rows per source.
            weights: relative shares of the draws.
            seed: seed of the shuffling.
            slots: packers of the run.
        """
        self.lengths = tuple(lengths)
        self.slots = slots
        self.shares = tuple(weight / sum(weights) for weight in weights)
        self.seed = seed
        # Different phases, so that sources of equal weight are not all drawn at the same time.
        self._phases = tuple((source + 0.5) / len(lengths) for source in range(len(lengths)))
        self._permutations: list[dict[int, np.ndarray]] = [{} for _ in lengths]  # per source: epoch -> rows

    def draw(self, index: int, begun: Sequence[int] = ()) -> Draw:
        """See :meth:`Order.draw`."""
        return next(self.draws(index))

    def draws(self, start: int = 0, begun: Sequence[int] = ()) -> Iterator[Draw]:
        """See :meth:`Order.draws`. This order has no stages."""
        for index, source, count in self._counted(start):
            yield index, source, self._row(source, count)

    def epochs(self, start: int = 0, begun: Sequence[int] = ()) -> Iterator[tuple[int, int, int]]:
        """See :meth:`Order.epochs`."""
        for index, source, count in self._counted(start):
            yield index, source, count // self.lengths[source]

    def stage_of(self, step: int) -> int:
        """See :meth:`Order.stage_of`."""
        return 0

    def is_first(self, index: int, begun: Sequence[int] = ()) -> bool:
        """See :meth:`Order.is_first`."""
        _, source, count = next(self._counted(index))
        return count < self.lengths[source]

    def _counted(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yield the draws of a slot as ``(index, source, draw of that source)``, from index ``start`` on."""
        index, position = start, self._position_in_time(start)
        for drawn, source, count in self._by_time_from(position):
            if drawn == position:
                yield index, source, count
                index += self.slots
                position = self._position_in_time(index)

    def _position_in_time(self, index: int) -> int:
        """Return the position of a global index among all draws sorted by time."""
        block, slot = divmod(index, self.slots)
        random_bytes = hashlib.blake2b(f"{self.seed} {block}".encode(), digest_size=8).digest()
        return block * self.slots + (slot + int.from_bytes(random_bytes, "little")) % self.slots

    def _by_time_from(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(position, source, draw of that source)`` sorted by time, from position ``start`` on."""
        begin = start - len(self.lengths) - 1  # early enough that fewer than `start` draws come before this time
        drawn = [self._num_before(begin, source) for source in range(len(self.lengths))]
        upcoming = [(self._time(source, count), source, count) for source, count in enumerate(drawn)]
        heapq.heapify(upcoming)
        position = sum(drawn)
        while True:
            _, source, count = upcoming[0]
            heapq.heapreplace(upcoming, (self._time(source, count + 1), source, count + 1))
            if position >= start:
                yield position, source, count
            position += 1

    def _time(self, source: int, count: int) -> float:
        return (count + self._phases[source]) / self.shares[source]

    def _num_before(self, time: float, source: int) -> int:
        """Return the number of draws of ``source`` with a smaller time, with the rounding of :meth:`_time`."""
        count = max(0, math.ceil(time * self.shares[source] - self._phases[source]))
        while count and self._time(source, count - 1) >= time:
            count -= 1
        while self._time(source, count) < time:
            count += 1
        return count

    def _row(self, source: int, count: int) -> int:
        epoch, position = divmod(count, self.lengths[source])
        permutations = self._permutations[source]
        if epoch not in permutations:
            if len(permutations) == 2:  # samples that wait for a pack may be of the previous epoch
                del permutations[min(permutations)]
            permutations[epoch] = np.random.default_rng([self.seed, source, epoch]).permutation(self.lengths[source])
        return int(permutations[epoch][position])
