from __future__ import annotations

import shlex
import sys

import pytest

from omnitrain.cli import resume_hint
from omnitrain.train.launch.environment import LAUNCHER

OVERRIDES = ["train.steps=20", "data.train=[{path: my data.parquet}]"]


@pytest.fixture(autouse=True)
def _as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LAUNCHER, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def words() -> list[str]:
    return shlex.split(resume_hint.resume_hint("my run.yaml", OVERRIDES).removeprefix("to continue: "))


def test_the_hint_is_the_command_with_resume_and_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["run", "my run.yaml", *OVERRIDES]
    monkeypatch.setattr(resume_hint.shutil, "which", lambda name: None)
    assert words() == [sys.executable, "-m", "omnitrain", *given, "--resume"]
    monkeypatch.setattr(resume_hint.shutil, "which", lambda name: f"{sys.executable.rpartition('/')[0]}/{name}")
    assert words() == ["omnitrain", *given, "--resume"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(LAUNCHER, "123")
    assert words() == ["omnitrain", *given, "--nproc", "4", "--resume"]


def test_under_torchrun_the_command_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (
        resume_hint.resume_hint("my.yaml", []) == "to continue, start the same command again with --resume at its end"
    )
