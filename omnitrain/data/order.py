"""The order of training data: a pure function of ``(seed, global index)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class SampleOrder:
    """Which row of which source is the ``index``-th of the run. Endless: each source is reshuffled every epoch.

    Sources are interleaved by smooth weighted round robin: after any number of draws, each source's count is within
    one of its share.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """``lengths``: rows per source; ``weights``: relative shares of the draws."""
        self.lengths = tuple(lengths)
        self.shares = tuple(weight / sum(weights) for weight in weights)
        self.seed = seed
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yields ``(index, source, row)`` for index 0, 1, 2, ..."""
        drawn = [0] * len(self.lengths)
        index = 0
        while True:
            source = max(range(len(drawn)), key=lambda s: self.shares[s] * (index + 1) - drawn[s])
            yield index, source, self._row(source, drawn[source])
            drawn[source] += 1
            index += 1

    def _row(self, source: int, draw: int) -> int:
        epoch, position = divmod(draw, self.lengths[source])
        known = self._permutations.get(source)
        if known is None or known[0] != epoch:
            shuffled = np.random.default_rng([self.seed, source, epoch]).permutation(self.lengths[source])
            known = self._permutations[source] = (epoch, shuffled)
        return int(known[1][position])
