from __future__ import annotations

import shlex
import sys

import pytest

from omnitrain.cli import main
from omnitrain.train.launch.environment import LAUNCHER


@pytest.fixture(autouse=True)
def _as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LAUNCHER, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def words() -> list[str]:
    return shlex.split(main.resume_hint("my run").removeprefix("to continue: "))


def test_the_hint_names_the_folder_and_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.shutil, "which", lambda name: None)
    assert words() == [sys.executable, "-m", "omnitrain", "run", "my run"]
    monkeypatch.setattr(main.shutil, "which", lambda name: f"{sys.executable.rpartition('/')[0]}/{name}")
    assert words() == ["omnitrain", "run", "my run"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(LAUNCHER, "123")
    assert words() == ["omnitrain", "run", "my run", "--nproc", "4"]


def test_under_torchrun_the_command_of_the_launcher_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main.resume_hint("runs/mine") == (
        "to continue, start `-m omnitrain run runs/mine` in place of `-m omnitrain run ...`"
    )
