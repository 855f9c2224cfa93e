"""Which checkpoints of a run stay: the newest ones, one every N steps, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The rule after which checkpoints are removed.

    Attributes:
        last: number of newest checkpoints that stay.
        every: checkpoints after a multiple of so many steps stay forever.
        best: the checkpoint with the lowest value of this metric of ``metrics.jsonl`` stays.
    """

    last: int = 2
    every: int | None = None
    best: str | None = None

    def leaving(self, values: Mapping[int, float | None]) -> list[int]:
        """Return the steps of the checkpoints to remove, of all steps -> their metric. None: it was not measured there.

        Of equal values the earliest is the best; one that is not finite never is.
        """
        steps = sorted(values)
        stay = set(steps[-self.last :])
        if self.every is not None:
            stay |= {step for step in steps if step % self.every == 0}
        measured = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        if self.best is not None and measured:
            stay.add(min(measured, key=lambda step: (measured[step], step)))
        return [step for step in steps if step not in stay]
