"""Signals to real processes: SIGTERM saves and asks for a new start; SIGKILL at any moment costs some steps at most."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omnitrain.checkpoint.store import verify
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.train.metrics.console import console
from omnitrain.train.trainer import Trainer
from tests.forked import Forked, omnitrain
from tests.tiny import tiny_recipe
from tests.train.test_trainer import load, losses, weights

ROOT = Path(__file__).parents[2]


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "omnitrain", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


DIES_AND_NOTES_SAMPLES = """
import os, signal
from omnitrain.train.trainer import Trainer
train_step = Trainer.train_step

def noted(trainer, batch):
    if trainer.step == 3 and os.environ.get("WORLD_SIZE") == "4" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    done = train_step(trainer, batch)
    with open(f"{trainer.folder.path}-{trainer.step}", "a") as notes:
        drawn = (pair for pack in batch.packs for pair in zip(pack.info.ids, pack.info.indices))
        notes.write("".join(f"{name}\\n" for name, index in drawn if index >= 0))  # no idle prompts
    return done

Trainer.train_step = noted
"""

SGD_WITH_MOMENTUM = """
import torch
from omnitrain.train import lr_groups as of_runs

def with_momentum(model, settings, *_):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    group = {"params": trained, "peak": settings.learning_rate}
    return torch.optim.SGD([group], settings.learning_rate, momentum=0.9, foreach=False)

of_runs.build_optimizer = with_momentum
"""


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    told, _ = process.communicate(timeout=120)
    return process.returncode, told


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def assert_equal_runs(run: Path, whole: Path) -> None:
    assert losses(run) == losses(whole)
    expected = weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(run).items())


def test_sigterm_saves_and_exits_with_the_code_that_schedulers_start_again(
    forked: Callable[..., Forked], tmp_path: Path
) -> None:
    """Twice, as a scheduler may send it."""
    recipe, run = str(tiny_recipe(tmp_path, text_only=True, steps=3000)), tmp_path / "run"
    command = forked(tmp_path / "printed", omnitrain, "run", recipe, "--auto-resume")
    command.wait_until(lambda: steps_done(run) >= 3)
    command.process.terminate()
    time.sleep(0.01)
    command.process.terminate()
    code, told = command.ended()
    assert code == 143, told
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name[5:])
    assert f"interrupted at step {step} of 3000; saved {checkpoint}" in told
    assert told.endswith(f"omnitrain run {run}\n")
    with console.capture() as printed:
        assert Trainer(load(Path(recipe), f"train.steps={step + 1}"), resume="auto").fit().step == step + 1
    assert f"{step} steps are done, 1 are left" in " ".join(printed.get().split())


def train(recipe: Path, overrides: list[str], folder: str, killed_at: int = 0) -> int:
    """Train, and return how often the run accessed a path in its folder; before the n-th access it is killed."""
    trainer = Trainer(load(recipe, *overrides), resume="auto")
    accesses, is_counting = 0, True

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal accesses
        if is_counting and any(isinstance(given, str | Path) and str(given).startswith(folder) for given in arguments):
            accesses += 1
            if accesses == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    trainer.fit()
    is_counting = False  # a hook cannot be removed
    return accesses


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_moment_of_its_saves_goes_on_from_a_whole_checkpoint(
    ranks: RankPool, tmp_path: Path, kills: int
) -> None:
    steps = 3 + kills
    recipe = tiny_recipe(tmp_path, text_only=True, steps=steps, save={"every": 1, "keep_every": 4})
    whole, run = tmp_path / "whole", tmp_path / "run"
    (accesses,) = ranks.run(train, recipe, [f"output_dir={whole}"], str(whole), timeout_s=60, world=1)
    draw = random.Random(0)
    for _ in range(kills):
        killed_at = draw.randint(1, 2 * accesses // steps)  # in the first two steps of each start
        with pytest.raises(RankError, match="died with exit code -9"):
            ranks.run(train, recipe, [], str(run), killed_at, timeout_s=60, world=1)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            verify(checkpoint)
    ranks.run(train, recipe, [], str(run), timeout_s=60, world=1)
    assert_equal_runs(run, whole)
    assert sorted(path.name for path in run.rglob("*")) == sorted(path.name for path in whole.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", SGD_WITH_MOMENTUM], ids=["adamw", "sgd"])
def test_a_run_that_loses_a_rank_goes_on_by_itself_with_the_others(tmp_path: Path, optimizer: str) -> None:
    (tmp_path / "plugin.py").write_text(DIES_AND_NOTES_SAMPLES + optimizer)
    recipe = tiny_recipe(tmp_path, text_only=True, steps=6, save={"every": 2}, packs_per_step=4)
    plugin = f"plugins=[{tmp_path / 'plugin.py'}]"
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder, ranks in ((whole, []), (run, ["--nproc", "4", "--max-restarts", "2"])):
        code, told = ended(started("run", str(recipe), plugin, f"output_dir={folder}", *ranks))
        assert code == 0, told
    lost = "rank 1 was killed by SIGKILL (exit code -9); the other ranks were ended"
    assert f"omnitrain: {lost}; restart 1 of 2 on 3 ranks\n" in told
    assert "train.packs_per_step 4 on 3 data-parallel ranks: micro-batch 2 of 2 of a step is on 1 of them only" in told
    assert "2 steps are done, 4 are left" in " ".join(told.split())
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    for step in range(1, 7):
        expected, found = (Path(f"{folder}-{step}").read_text().split() for folder in (whole, run))
        assert sorted(found) == sorted(expected * (2 if step == 3 else 1)), step  # that one was done twice
