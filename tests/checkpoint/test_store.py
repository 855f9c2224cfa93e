import contextlib
import math
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import save_file

from omnitrain.checkpoint.store import (
    CheckpointStore,
    Retention,
    newest_checkpoint,
    require_as_saved,
    set_default_modes,
    write_metrics,
)
from omnitrain.errors import TrainingError, UserError
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.peers import GlooGroup


def write(text: str):
    return lambda folder: (folder / "state.txt").write_text(text)


def test_the_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 20, 3):
        store.save(step, write(str(step)))
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["step-00000003", "step-00000020"]
    assert (store.latest() / "state.txt").read_text() == "20"


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(last=2), [50, 60]),
        (Retention(last=1, every=20), [20, 40, 60]),
        (Retention(last=1, best="loss"), [30, 60]),
        (Retention(last=1, best="heads.text.loss"), [10, 60]),
        (Retention(last=1, every=50, best="heldout.loss"), [50, 60]),
    ],
)
def test_the_newest_the_best_and_one_every_n_steps_are_kept(tmp_path: Path, rule: Retention, kept: list[int]) -> None:
    """Step 20 has no line of metrics; the loss of step 40 is not a number; that of step 50 is no better than 30's."""
    store, losses = CheckpointStore(tmp_path, rule), {10: 3.0, 30: 2.0, 40: math.nan, 50: 2.0, 60: 2.5}
    for step in range(10, 70, 10):

        def write(folder: Path, step: int = step) -> None:
            if step in losses:
                write_metrics(folder, {"loss": losses[step], "heads": {"text": {"loss": step / 10 or None}}})

        store.save(step, write)
    assert [int(folder.name[5:]) for folder in sorted(tmp_path.iterdir())] == kept


def test_what_a_user_puts_beside_them_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, Retention(last=1))
    store.save(1, write("1"))
    (tmp_path / "step-00000001-best").mkdir()
    (tmp_path / "step-00000009.tar").write_text("of another one")
    assert store.newest().name == "step-00000001"
    store.save(2, write("2"))
    store.save(2, write("again"))
    names = ["step-00000001-best", "step-00000002", "step-00000009.tar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (store.latest() / "state.txt").read_text() == "again"


def test_one_that_its_run_removes_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, Retention(last=1))
    store.save(1, write("1"))

    def meanwhile(file: Path) -> str:
        shutil.rmtree(file.parent)
        return "other"

    monkeypatch.setattr("omnitrain.checkpoint.store._checksum", meanwhile)
    with pytest.raises(UserError, match="step-00000001 was removed while it was read: its run is still training"):
        store.latest()


def test_a_crash_while_writing_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, write("good"))

    def crash(folder: Path) -> None:
        write("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, crash)
    assert (store.latest() / "state.txt").read_text() == "good"
    assert store.save(2, write("whole")) == store.latest()


def test_a_full_disk_is_told_in_a_line_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """Each library that writes a checkpoint's files has an error of its own for it."""
    store = CheckpointStore(tmp_path)
    store.save(1, write("good"))
    full = "No space left on device"
    for error in (OSError(28, full), SafetensorError("I/O error"), RuntimeError("unexpected pos"), Exception(full)):

        def fail(folder: Path, error: Exception = error) -> None:
            (folder / "half.txt").write_text("half")
            raise error

        told = rf"step-00000002 cannot be written \(.*{error.args[-1]}; [\d.,]+ [MG]iB are free there\);"
        with pytest.raises(TrainingError, match=told):
            store.save(2, fail)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000001"]
    assert (store.latest() / "state.txt").read_text() == "good"


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
@pytest.mark.parametrize("folder_mode", [0o700, 0o755, 0o2775, 0o1777])
def test_weights_have_the_permissions_that_the_umask_asks_for(
    tmp_path: Path, umask: int, mode: int, folder_mode: int
) -> None:
    """safetensors alone would make files that only their owner reads; a folder for a group opens no file to it."""
    tmp_path.chmod(folder_mode)
    before = os.umask(umask)
    try:
        CheckpointStore(tmp_path, Retention(last=1)).save(1, lambda path: save_file({}, path / "model.safetensors"))
        save_file({}, tmp_path / "model.safetensors")
        set_default_modes([tmp_path / "model.safetensors"])
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 4 and {file.stat().st_mode & 0o777 for file in files} == {mode}
    assert len({file.stat().st_gid for file in files}) == 1


def test_a_mistake_in_writing_is_no_full_disk_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        CheckpointStore(tmp_path).save(1, lambda folder: {}["weight"])
    assert not any(tmp_path.iterdir())


def test_what_crashes_left_behind_is_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, write("good"))
    for step in (2, 3):
        (tmp_path / f".step-{step:08d}.partial").mkdir()
    store.clear_unfinished()
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000001"]


def test_every_file_and_folder_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("omnitrain.checkpoint.store._sync", lambda path: synced.append(path.name))

    def nested(folder: Path) -> None:
        (folder / "weights").mkdir()
        write("good")(folder / "weights")

    store = CheckpointStore(tmp_path, Retention(last=1))
    store.save(1, nested)
    *before, after = synced
    assert sorted(before) == [".step-00000001.partial", "manifest.json", "state.txt", "weights"]
    assert after == tmp_path.name


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    file = CheckpointStore(tmp_path, Retention(last=1)).save(1, write("good")) / "state.txt"
    file.write_text("goof") if damage == "flip" else file.unlink()
    with pytest.raises(UserError, match=r"damaged: \['state\.txt'\]"):
        CheckpointStore(tmp_path, Retention(last=1)).latest()


def test_a_folder_that_will_not_be_read_is_not_compared(tmp_path: Path) -> None:
    def write_two(folder: Path) -> None:
        for name in ("weights", "optimizer"):
            (folder / name).mkdir()
            (folder / name / "file").write_text("good")

    checkpoint = CheckpointStore(tmp_path, Retention(last=1)).save(1, write_two)
    (checkpoint / "optimizer" / "file").write_text("goof")
    require_as_saved(checkpoint, unread="optimizer")
    with pytest.raises(UserError, match=r"damaged: \['optimizer/file'\]"):
        require_as_saved(checkpoint)
    (checkpoint / "weights" / "file").unlink()
    with pytest.raises(UserError, match=r"damaged: \['weights/file'\]"):
        require_as_saved(checkpoint, unread="optimizer")


def test_nothing_to_resume_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in"):
        CheckpointStore(tmp_path / "none", Retention(last=1)).latest()
    with pytest.raises(UserError, match="neither a saved omni model"):
        newest_checkpoint(tmp_path)


def met_alone(folder: Path) -> None:
    """Rank 1 meets something while rank 0 waits for it."""
    peers = GlooGroup()

    def write(temporary: Path) -> None:
        if peers.rank == 1:
            raise RuntimeError("not enough memory")
        dist.barrier()

    CheckpointStore(folder, Retention(last=1)).save(1, write, peers)


def test_what_a_rank_meets_alone_while_all_write_is_raised_there_and_not_after_the_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"step-00000001 cannot be written \(not enough memory;"):
        ranks.run(met_alone, tmp_path, timeout_s=5, world=2)


@pytest.mark.parametrize("what", [OSError(39, "Directory not empty"), KeyboardInterrupt()])
def test_a_checkpoint_whose_removal_does_not_end_is_none_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: BaseException
) -> None:
    """A crash, or a shared disk on which another process reads it, leaves some of its files."""
    store = CheckpointStore(tmp_path, Retention(last=1))
    store.save(1, write("old"))
    unlink = os.unlink

    def stop(path: str, **options: int) -> None:
        if path == "state.txt":
            raise what
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", stop)
    with contextlib.suppress(KeyboardInterrupt):
        store.save(2, write("new"))
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-00000002"]
    monkeypatch.undo()
    store.clear_unfinished()
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000002"]
