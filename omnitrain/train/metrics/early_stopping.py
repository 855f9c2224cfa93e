"""Decide from the lines of ``metrics.jsonl`` whether a run should end early."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omnitrain.recipe.train import EarlyStopping


class StopWatcher:
    """Counts measurements of a metric without improvement.

    ``reason``: why the run should end, in words; None: it should go on.
    """

    def __init__(self, settings: EarlyStopping, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Continue from the ``lines`` that the run has written so far."""
        self._settings = settings
        self._best, self._best_step, self._missed = float("nan"), 0, 0
        self.reason: str | None = None
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics; one without the metric does not count."""
        value: Any = line
        for part in self._settings.metric.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            return
        gain = (self._best - value) if self._settings.mode == "min" else (value - self._best)
        if not self._best_step or gain > self._settings.min_delta:
            self._best, self._best_step, self._missed, self.reason = value, line["step"], 0, None
            return
        self._missed += 1
        if self._missed >= self._settings.patience:
            self.reason = (
                f"{self._settings.metric} has not improved in {self._missed} measurement{'s' * (self._missed > 1)} "
                f"since {self._best:.4g} at step {self._best_step} (train.early_stopping)"
            )


def read_lines(file: Path, last_step: int) -> list[str]:
    """Return the lines of a ``metrics.jsonl`` up to a step, without an incomplete last one; none without a file."""
    whole = file.read_text().rpartition("\n")[0] if file.is_file() and last_step else ""
    return [line for line in whole.splitlines() if json.loads(line)["step"] <= last_step]
