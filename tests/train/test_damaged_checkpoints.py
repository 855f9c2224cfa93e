"""A damaged checkpoint is named, and never trained from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from omnitrain.checkpoint.store import CheckpointStore
from omnitrain.errors import DamagedCheckpointError, UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.peers import GlooGroup
from omnitrain.train.metrics.console import console
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_trainer import load, losses, weights


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "truncate": truncate, "remove": Path.unlink}


@contextmanager
def damaged(file: Path, damage: Callable[[Path], None]) -> Iterator[None]:
    content = file.read_bytes()
    damage(file)
    yield
    file.write_bytes(content)


def test_whatever_happens_to_any_file_of_the_newest_the_one_before_it_is_found(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, steps=2, save={"every": 1}, log_every=2))
    newest = Trainer(recipe).fit().checkpoint
    files = [str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()]
    assert {"manifest.json", "metrics.json", "trainer.pt", "model.safetensors", "optimizer/.metadata"} < set(files)
    for name in files:
        for damage in DAMAGES.values():
            store = CheckpointStore(newest.parent)
            with damaged(newest / name, damage):
                with pytest.raises(DamagedCheckpointError) as told:
                    store.latest()
                assert told.value.files == (name,) and f"{newest} is damaged: [{name!r}]" in str(told.value)
                assert store.latest_intact() == newest.with_name("step-00000001")
                assert store.damaged == {newest: (name,)}
    assert CheckpointStore(newest.parent).latest_intact() == newest


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=4, save={"every": 1, "keep_last": 1, "keep_every": 2})
    Trainer(load(recipe, f"output_dir={tmp_path / 'whole'}")).fit()
    newest = Trainer(load(recipe)).fit().checkpoint
    flip(newest / "trainer.pt")
    assert RunFolder(load(recipe)).finished() is None
    with pytest.raises(DamagedCheckpointError, match=r"step-00000004 is damaged: \['trainer.pt'\]"):
        Trainer(load(recipe), resume=True)
    with console.capture() as printed:
        assert Trainer(load(recipe), resume="auto").fit().step == 4
    told = " ".join(printed.get().split())
    assert f"checkpoint {newest} is damaged: ['trainer.pt']; the one before it is used" in told
    assert f"a damaged checkpoint is now in {newest}.damaged" in told and "2 steps are done, 2 are left" in told
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(weight, whole[name]) for name, weight in weights(tmp_path / "run").items())
    names = ["step-00000002", "step-00000004", "step-00000004.damaged"]
    assert sorted(path.name for path in newest.parent.iterdir()) == names


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again_by_itself(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, text_only=True, steps=2, save={"every": 1}))
    checkpoint = Trainer(recipe).fit().checkpoint
    (checkpoint / "manifest.json").unlink()
    truncate(checkpoint.with_name("step-00000001") / "trainer.pt")
    with pytest.raises(DamagedCheckpointError, match=r"all checkpoints in .* are damaged \(step-00000002: \['manifest"):
        Trainer(recipe, resume="auto")


def write_three(folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / name).write_text("content")


def intact_on_a_rank(folder: Path) -> str:
    found = CheckpointStore(folder).latest_intact(GlooGroup())
    assert found is not None
    return found.name


def test_all_ranks_take_the_same_checkpoint_whichever_of_them_reads_the_damaged_file(
    ranks: RankPool, tmp_path: Path
) -> None:
    for step in (1, 2):
        CheckpointStore(tmp_path).save(step, write_three)
    for name in ("a", "b", "manifest.json"):
        with damaged(tmp_path / "step-00000002" / name, DAMAGES["remove"]):
            assert ranks.run(intact_on_a_rank, tmp_path, timeout_s=60, world=2) == ["step-00000001"] * 2


@pytest.mark.second
def test_auto_resume_starts_continues_and_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=2)
    folder = tmp_path / "run"
    assert Trainer(load(recipe), resume="auto").fit().step == 2
    with console.capture() as printed:
        assert Trainer(load(recipe, "train.steps=3"), resume="auto").fit().step == 3
    assert "2 steps are done, 1 are left" in " ".join(printed.get().split())
    with pytest.raises(UserError, match=r"started with another recipe:\n  train.seed: was 0, is 1"):
        Trainer(load(recipe, "train.seed=1"), resume="auto")
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    assert Trainer(load(recipe), resume="auto").fit().step == 2  # it had no checkpoint: it starts, in the same folder
    assert not (tmp_path / "run.old1").exists() and len(losses(folder)) == 2
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    with pytest.raises(UserError, match="has files but no run"):
        Trainer(load(recipe, f"output_dir={tmp_path / 'thesis'}"), resume="auto")


@pytest.mark.parametrize("begun", [False, True])
def test_of_two_runs_that_start_together_the_slow_one_does_not_undo_what_the_fast_one_saved(
    tmp_path: Path, begun: bool
) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=2)
    if begun:
        Trainer(load(recipe, "train.steps=1")).fit()
    slow = Trainer(load(recipe), resume="auto")
    saved = Trainer(load(recipe), resume="auto").fit().checkpoint
    with pytest.raises(UserError, match=f"another run has saved {saved} while this one started; start it again"):
        slow.fit()
    assert Trainer(load(recipe), resume="auto").fit().checkpoint == saved
