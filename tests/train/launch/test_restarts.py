"""Ranks that die, and what the launcher starts again; with programs that do not import torch and so start at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from omnitrain.errors import TrainingError
from omnitrain.train.launch.launch import RanksLostError, _devices, launch_with_restarts
from tests.train.launch.test_launch import _in_an_empty_folder, program

__all__ = ["_in_an_empty_folder"]

DIES = """
    world = int(os.environ["WORLD_SIZE"])
    Path(f"ran-{world}-{rank}").touch()
    if rank == 1 and world in (4, 3):
        while not all(Path(f"ran-{world}-{other}").exists() for other in range(world)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if world in (4, 3):
        time.sleep(600)
"""


def run(
    script: Sequence[str], nproc: int, max_restarts: int, sizes: Sequence[int] = range(9)
) -> tuple[int, list[str], int]:
    """The exit code, what the user is told, and the number of starts."""
    told: list[str] = []
    starts: list[Sequence[str]] = []

    def arguments() -> Sequence[str]:
        starts.append(script)
        return script

    code = launch_with_restarts(
        arguments,
        nproc,
        max_restarts=max_restarts,
        fits=lambda size: size in sizes,
        say=told.append,
        stop_seconds=60,
    )
    return code, told, len(starts)


def test_a_run_goes_on_with_the_ranks_that_are_left_until_it_ends() -> None:
    lost = "rank 1 was killed by SIGKILL (exit code -9); the other ranks were ended"
    code, told, starts = run(program(DIES), 4, max_restarts=5)
    assert (code, starts) == (0, 3)
    assert told == [f"{lost}; restart 1 of 5 on 3 ranks", f"{lost}; restart 2 of 5 on 2 ranks"]
    assert sorted(path.name for path in Path().glob("ran-2-*")) == ["ran-2-0", "ran-2-1"]


def test_ranks_that_the_layout_cannot_use_are_idle_and_take_the_place_of_the_next_that_dies() -> None:
    code, told, _ = run(program(DIES.replace("(4, 3)", "(4,)")), 4, max_restarts=1, sizes=(2, 4))
    assert code == 0 and told[0].endswith("restart 1 of 1 on 2 ranks, 1 idle")


def test_where_no_number_of_ranks_left_works_a_scheduler_is_asked_for_others() -> None:
    code, told, starts = run(program(DIES), 4, max_restarts=5, sizes=(4,))
    assert (code, starts) == (143, 1)
    assert told[0].endswith("the run does not work on fewer than 4 ranks, so it ends")


def test_the_last_start_that_was_allowed_ends_the_run() -> None:
    with pytest.raises(RanksLostError, match="rank 1 was killed by SIGKILL"):
        run(program(DIES), 4, max_restarts=1)
    assert not any(Path().glob("ran-2-*"))


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("sys.exit(2)", 2),  # a mistake of the user
        ("sys.exit(rank + 1)", 2),  # which one rank finds
        ("sys.exit(143)", 143),  # SIGTERM
        ("sys.exit(1)", "exit code 1"),  # the data failed, a loss is not finite, the disk is full
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),  # all crash alike
    ],
)
def test_what_would_happen_again_does_not_start_again(body: str, ends: int | str) -> None:
    if isinstance(ends, int):
        assert run(program(body), 2, max_restarts=3) == (ends, [], 1)
        return
    with pytest.raises(TrainingError, match=ends):
        run(program(f"Path(f'{{os.getpid()}}.start').touch()\n{body}"), 2, max_restarts=3)
    assert len(list(Path().glob("*.start"))) == 2


@pytest.mark.parametrize(
    ("visible", "shown"), [(None, "0,2,3"), ("4,5,6,7", "4,6,7"), ("GPU-a,GPU-b", None), ("", None)]
)
def test_the_device_of_a_rank_that_died_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, shown: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _devices([0, 2, 3]) == ({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})
    assert _devices(None) == {}
