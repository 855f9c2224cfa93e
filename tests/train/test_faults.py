"""What the machine does to a run: its folder is removed, its disk becomes read-only, its clock jumps."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnitrain.errors import TrainingError
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_trainer import load, losses


def after_step(trainer: Trainer, step: int, happens: Callable[[], object]) -> Trainer:
    inner = trainer.train_step

    def train_step(batch: StepBatch) -> Any:
        result = inner(batch)
        if trainer.step == step:
            happens()
        return result

    trainer.train_step = train_step
    return trainer


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_folder_that_is_removed_ends_the_run_and_is_not_made_again_without_its_recipe(
    tmp_path: Path, log_every: int
) -> None:
    """Whether a line of metrics or a checkpoint is written first."""
    recipe = load(tiny_recipe(tmp_path, text_only=True, steps=6, save={"every": 2}, log_every=log_every))
    trainer = after_step(Trainer(recipe), 3, lambda: shutil.rmtree(tmp_path / "run"))
    file = "metrics.jsonl" if log_every == 1 else "checkpoints/step-00000004"
    with pytest.raises(TrainingError, match=rf"{tmp_path}/run/{file} cannot be written \(.*No such file or directory"):
        trainer.fit()
    assert not (tmp_path / "run").exists()


def test_a_disk_that_becomes_read_only_ends_the_run_which_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=4, save={"every": 2})
    Trainer(load(recipe, f"output_dir={tmp_path / 'whole'}")).fit()
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.startswith(".step-"):
            raise OSError(30, "Read-only file system")
        mkdir(path, *arguments, **options)

    trainer = after_step(Trainer(load(recipe)), 3, lambda: monkeypatch.setattr(Path, "mkdir", refuse))
    told = r"step-00000004 cannot be written \(\[Errno 30\] Read-only file system; .* earlier checkpoints are intact"
    with pytest.raises(TrainingError, match=told):
        trainer.fit()
    monkeypatch.undo()
    Trainer(load(recipe), resume=True).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.second
def test_a_clock_that_jumps_changes_neither_what_is_saved_nor_what_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backwards and forwards by up to a year, and the times of the files with it."""
    recipe, draw, now = (
        tiny_recipe(tmp_path, text_only=True, steps=5, save={"keep_every": 2, "keep_last": 1}),
        random.Random(0),
        time.time,
    )
    Trainer(load(recipe, f"output_dir={tmp_path / 'whole'}")).fit()
    monkeypatch.setattr(time, "time", lambda: now() + draw.uniform(-3e7, 3e7))
    cut = after_step(Trainer(load(recipe)), 3, lambda: os.kill(os.getpid(), 2))
    checkpoints = cut.fit().checkpoint.parent
    for age, folder in enumerate(sorted(checkpoints.iterdir())):
        os.utime(folder, (1e9 - 1e6 * age, 1e9 - 1e6 * age))  # the newest looks oldest
    Trainer(load(recipe), resume=True).fit()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert sorted(folder.name[-1] for folder in checkpoints.iterdir()) == ["2", "4", "5"]
