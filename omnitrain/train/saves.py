"""The checkpoints of a run: when they are saved, and what a failure says of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnitrain.errors import LostRankError, TrainingError
from omnitrain.recipe import Recipe
from omnitrain.train.measures import RunMeasures
from omnitrain.train.nonfinite import unsound_parameters
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.run_state.save import Saver

_SECONDS = 600.0
_TIMES_A_SAVE = 20  # so that saving takes at most 5 % of a run
_PARTS = 10


class SaveTimes:
    """Decides after each step whether to save. The clock of one rank decides for all ranks.

    ``auto`` saves after ten minutes. Where a checkpoint takes longer than 30 seconds, it saves after 20 times as long,
    or after a tenth of the run's steps, if that is sooner. So a crash costs at most ten minutes or a tenth of the run.
    With ``train.save.keep_best`` it waits for a step that measures the metric, but not twice as long as without.
    """

    def __init__(self, recipe: Recipe, step: int) -> None:
        self._recipe, self._every, self._kept = recipe, recipe.train.save.every, recipe.train.save.keep_every
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


class Saves:
    """Saves a run after the steps where it is due, and tells ``on_save``. Every rank calls all methods."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        measures: RunMeasures,
        saver: Saver,
        tell: Callable[..., None],
        paused: Callable[[str], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._is_auto = recipe.train.save.every == "auto"
        self._folder, self._store, self._ranks = folder, folder.store, measures.ranks
        self._measures, self._saver, self._tell, self._paused = measures, saver, tell, paused
        self.times = SaveTimes(recipe, measures.step)

    def rehearse(self) -> None:
        """Fail in the first step of a run that saves before its end, if a save would fail."""
        if self.times.before_end and not self._saver.is_rehearsed:
            self._saver.rehearse(self._measures.to_save())

    def after_step(self, is_interrupted: Callable[[], bool], is_stopped: bool) -> tuple[bool, bool]:
        """Save, or finish a save, where all ranks agree. Return whether any rank is interrupted, and any stopped."""
        flags = [self._is_due(), is_interrupted(), is_stopped, self._saver.is_writing, self._saver.has_failed]
        is_due, interrupted, stopped, is_writing, has_failed = self._ranks.peers.any_of_each(flags)
        if has_failed or not is_writing:
            self._finish()
        if is_due and not (interrupted or stopped):
            self.save(waits=False)
            interrupted = self._ranks.peers.any(is_interrupted())
        return interrupted, stopped

    def _is_due(self) -> bool:
        """Whether to save after this step; the first rank decides for all. `auto` leaves space for the last save."""
        step = self._measures.step
        if not self._saver.is_writing:
            self.times.end()
        if not (self._ranks.is_first and self.times.is_due(step)):
            return False
        if self._is_auto and not self._folder.has_room(step):
            self.times.restart(step)
            return False
        return True

    def save(self, *, waits: bool = True) -> Path:
        """Save the finished steps. Without ``waits`` the checkpoint may be written while training goes on."""
        measures, target = self._measures, self._store.folder_of(self._measures.step)
        self._finish()
        if self._store.last == target:
            return target
        with self._paused("save"):
            self.times.begin(measures.step)
            line = measures.line if measures.line.get("step") == measures.step else None
            self._saver.save(measures.to_save(), line, waits=waits)
        if self._store.last == target:  # nothing is left to be written
            self.times.end()
            self._tell("on_save", target)
        return target

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        with self._paused("save"):
            written = self._saver.finish()
        if written is not None:
            self._tell("on_save", written)

    def saved_or_why_not(self, steps: str = "the steps before it") -> str:
        """Save the finished ``steps`` after a failure. An error of the disk must not hide that failure."""
        try:
            return f"{steps} are saved in {self.save()}"
        except LostRankError:  # it says itself why it failed
            raise
        except TrainingError as error:
            return f"{steps} could not be saved: {error}; {self._newest()}"

    def before_failure(self) -> str:
        """Save the steps before one that is not finite, and say where. Weights that are not finite are not saved."""
        if not self._measures.step:
            return "nothing is saved, because no step was done"
        with contextlib.suppress(TrainingError):  # the step's own error is the one to tell
            self._finish()
        if unsound := unsound_parameters(self._measures.model, self._ranks.peers):
            reason = f"the weights are not finite ({len(unsound)}: {unsound[0]}, ...)"
            return f"nothing is saved, because {reason}; {self._newest()}"
        message = self.saved_or_why_not()
        if self._store.last != self._store.folder_of(self._measures.step):
            return message
        return (
            f"{message}\n  with the same settings, `--resume` makes this step again; to change the optimizer or the "
            f"data, start a new run from these weights: model.checkpoint={self._folder.path} and another output_dir"
        )

    def _newest(self) -> str:
        return f"the last checkpoint is {self._store.last}" if self._store.last else "no checkpoint exists"
