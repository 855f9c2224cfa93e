"""When a run saves a checkpoint before its end."""

from __future__ import annotations

import time

from omnitrain.recipe import Recipe

_SECONDS = 600.0
_TIMES_A_SAVE = 20  # so that saving takes at most 5 % of a run
_PARTS = 10


class SaveTimes:
    """Decides after each step whether to save. The clock of one rank decides for all ranks.

    ``auto`` saves after ten minutes. Where a checkpoint takes longer than 30 seconds, it saves after 20 times as long,
    or after a tenth of the run's steps, if that is sooner. So a crash costs at most ten minutes or a tenth of the run.
    With ``train.keep_best`` it waits for a step that measures the metric, but not twice as long as without.
    """

    def __init__(self, recipe: Recipe, step: int) -> None:
        self._recipe, self._every, self._kept = recipe, recipe.train.save_every, recipe.train.keep_every
        self._steps, self._saved_step = recipe.train.steps, step
        self._saved_at = time.monotonic()
        self._seconds = 0.0
        self._begun_at: float | None = None

    @property
    def before_end(self) -> bool:
        """Whether the recipe may save before the end of the run."""
        return self._every is not None or self._kept is not None

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step`` steps. The end of a run saves anyway."""
        if step >= self._steps:
            return False
        if self._kept is not None and step % self._kept == 0:
            return True
        if self._every != "auto":
            return self._every is not None and step % self._every == 0
        if self._begun_at is not None:
            return False
        waited = time.monotonic() - self._saved_at
        is_tenth = _PARTS * (step - self._saved_step) >= self._steps
        seconds = _SECONDS if is_tenth else max(_SECONDS, _TIMES_A_SAVE * self._seconds)
        return waited >= (seconds if self._recipe.measures_best(step) else 2 * seconds)

    def begin(self, step: int) -> None:
        """Note that a save after ``step`` steps begins. None is due by `auto` until it ends."""
        self._saved_step, self._begun_at = step, time.monotonic()

    def end(self) -> None:
        """Note that no save is going on, and count from the end of the last one."""
        if self._begun_at is not None:
            self._saved_at, self._seconds = time.monotonic(), time.monotonic() - self._begun_at
            self._begun_at = None

    def restart(self, step: int) -> None:
        """Count from now, after ``step`` steps."""
        self._saved_at, self._saved_step, self._begun_at = time.monotonic(), step, None
