"""Speed, fill and balance of steps, from their plans."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np

from omnitrain.plan.step import StepPlan


class Stopwatch:
    """Seconds, tokens, samples and media since the last reading, and the time spent waiting for data."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._waited, self._tokens, self._samples = 0.0, 0, 0
        self._media: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # name -> items, tokens
        self._steps, self._most_tokens, self._mean_tokens = 0, 0.0, 0.0

    def add(self, plan: StepPlan, waited: float) -> None:
        """Count what a step has, and the seconds it waited for its packs."""
        self._steps += 1
        self._waited += waited
        self._tokens += int(plan.tokens.sum())
        self._samples += int(plan.num_samples.sum())
        media = plan.topology.media
        medium = plan.slot % max(1, len(media))
        for index, name in enumerate(media):
            of_name = plan.item_tokens[medium == index]
            self._media[name][0] += len(of_name)
            self._media[name][1] += int(of_name.sum())
        by_rank = plan.tokens[:, plan.topology.owners]
        self._most_tokens += float(np.max(by_rank, axis=1, initial=0).sum())
        self._mean_tokens += float(by_rank.sum()) / by_rank.shape[1]

    @property
    def seconds(self) -> float:
        """Time since the last reading."""
        return max(time.perf_counter() - self._start, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of this time that this rank spent waiting for its packs."""
        return self._waited / self.seconds

    def read(self, room: int) -> dict[str, Any]:
        """Return the speed of all ranks, fill and imbalance; and reset.

        ``fill`` is the share of the packs' room that has tokens: packs have no padding, so the rest is not computed.
        ``imbalance`` is the tokens of the rank that has most, micro-batch by micro-batch, divided by the mean.
        ``room``: the most tokens of a step, over all ranks.
        """
        seconds = self.seconds
        reading: dict[str, Any] = {
            "tokens_per_second": self._tokens / seconds,
            "samples_per_second": self._samples / seconds,
            "fill": self._tokens / max(1, self._steps * room),
            "imbalance": self._most_tokens / self._mean_tokens if self._mean_tokens else 1.0,
        }
        if self._media:
            reading["media"] = {
                name: {"items_per_second": items / seconds, "tokens_per_second": tokens / seconds}
                for name, (items, tokens) in sorted(self._media.items())
            }
        self._start += seconds
        self._reset()
        return reading
