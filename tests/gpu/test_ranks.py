"""Layouts on several GPUs, one rank on each, against a run of one process on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TASKS, tiny_recipe
from tests.train.test_ranks import LAYOUTS, TWO_SLOTS, assert_same_run, fit

SETTINGS = [*TWO_SLOTS, "train.flops=true", "train.precision=fp32", "train.log_every=1"]
IN_FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # convolutions, too


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its run on the CPU is beside it, in ``one``."""
    path = tiny_recipe(tmp_path_factory.mktemp("gpus"), rows=2 * len(TASKS))
    fit(path, [f"output_dir={path.parent / 'one'}", "train.device=cpu", *SETTINGS])
    return path


@pytest.mark.parametrize(
    ("world", "overrides"),
    [pytest.param(*row, marks=pytest.mark.gpu(row[0]), id=name) for name, row in LAYOUTS.items()],
)
def test_a_run_on_gpus_is_the_run_of_a_cpu(recipe: Path, tmp_path: Path, world: int, overrides: list[str]) -> None:
    arguments = [f"output_dir={tmp_path / 'run'}", "train.device=cuda", *SETTINGS, *overrides]
    command = [sys.executable, "-m", "omnitrain", "run", str(recipe), *arguments, "--nproc", str(world)]
    subprocess.run(command, check=True, timeout=300, env=os.environ | IN_FP32)
    assert_same_run(tmp_path / "run", recipe.parent / "one")
