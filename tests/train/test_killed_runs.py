"""Signals to real processes: SIGTERM saves and asks for a new start; SIGKILL at any moment costs some steps at most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_recipe
from tests.train.test_trainer import losses, weights

ROOT = Path(__file__).parents[2]


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "omnitrain", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


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


def test_sigterm_saves_and_exits_with_the_code_that_schedulers_start_again(tmp_path: Path) -> None:
    """Twice, as a scheduler may send it. The command that it starts again is the same."""
    recipe, run = str(tiny_recipe(tmp_path, text_only=True, steps=3000)), tmp_path / "run"
    process = started("run", recipe, "--auto-resume")
    wait_until(lambda: steps_done(run) >= 3, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, told = ended(process)
    assert code == 143, told
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name[5:])
    assert f"interrupted at step {step} of 3000; saved {checkpoint}" in told
    assert told.endswith(f"omnitrain resume {run}\n")
    process = started("run", recipe, f"train.steps={step + 1}", "--auto-resume")
    code, told = ended(process)
    assert code == 0 and f"{step} steps are done, 1 are left" in " ".join(told.split())
