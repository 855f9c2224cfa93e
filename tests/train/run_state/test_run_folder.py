"""The folder of a run, without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from omnitrain.data.packing.sample import Rejected
from omnitrain.errors import TrainingError, UserError
from omnitrain.recipe import Recipe
from omnitrain.train.run_state.run_folder import FolderLock, RunFolder, require_free
from tests.forked import Forked
from tests.tiny import tiny_recipe


def hold(path: Path) -> None:
    lock = FolderLock()
    lock.take(path)
    print("held", flush=True)
    time.sleep(60)


def run_folder(path: Path, output_dir: Path) -> RunFolder:
    return RunFolder(Recipe.load(str(path), [f"output_dir={output_dir}"]))


def test_of_two_runs_in_a_folder_the_second_one_is_refused_until_the_first_one_ends(
    forked: Callable[..., Forked], tmp_path: Path
) -> None:
    recipe, path = tiny_recipe(tmp_path), tmp_path / "run"
    run_folder(recipe, path).open(False, 0)
    other = forked(tmp_path / "printed", hold, path)
    other.wait_until(lambda: other.told == "held\n")
    told = rf"output_dir: a run \(process {other.process.pid} on .*\) writes to '{path}'"
    for resumed in (False, True):
        with pytest.raises(UserError, match=told):
            run_folder(recipe, path).open(resumed, 0)
    with pytest.raises(UserError, match=told):
        require_free(path)
    assert not (tmp_path / "run.old1").exists()
    other.process.kill()
    other.ended()
    require_free(path)
    run_folder(recipe, path).open(True, 0)


def test_what_a_crash_left_that_came_before_the_first_file_is_in_nobodys_way(tmp_path: Path) -> None:
    recipe, path = tiny_recipe(tmp_path), tmp_path / "run"
    path.mkdir()
    for name in (".lock", "recipe.yaml.tmp"):
        (path / name).touch()
    run_folder(recipe, path).open(False, 0)
    assert (path / "recipe.yaml").is_file()


def test_a_run_behind_a_link_is_moved_aside_where_it_is(tmp_path: Path) -> None:
    recipe, large = tiny_recipe(tmp_path), tmp_path / "large disk"
    (large / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(large / "run")
    for _ in range(2):
        folder = run_folder(recipe, tmp_path / "link")
        folder.open(False, 0)
        folder.close()
    assert (tmp_path / "link").is_symlink()
    assert [(large / name / "recipe.yaml").is_file() for name in ("run", "run.old1")] == [True, True]


def test_an_earlier_run_is_not_moved_from_under_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    run_folder(recipe, tmp_path / "run").open(False, 0)
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(UserError, match=r"'\.' has an earlier run, and this command was started inside of it"):
        run_folder(recipe, Path()).open(False, 0)


def test_a_full_disk_behind_a_checkpoint_is_a_line(tmp_path: Path) -> None:
    folder = run_folder(tiny_recipe(tmp_path), tmp_path / "run")
    folder.open(False, 0)
    (tmp_path / "run" / "rejected.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"rejected.jsonl cannot be written \(No space left on device\);"):
        folder.list_rejected([Rejected("row", "source", "reason")])
