"""Checkpoints that a process of their own writes while training goes on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from omnitrain.checkpoint.store import CheckpointStore, verify
from omnitrain.errors import TrainingError
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.step.rendezvous import open_rendezvous
from omnitrain.peers import Peers
from omnitrain.train.metrics.console import console
from omnitrain.train.run_state import save, writer
from omnitrain.train.run_state.snapshot import Snapshot
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_faults import after_step
from tests.train.test_killed_runs import assert_equal_runs
from tests.train.test_trainer import load, losses

OF_A_RUN = {"manifest.json", "metrics.json", "trainer.pt", "recipe.yaml", "environment.json"}  # with seconds, settings
PP2 = ["parallel.components.foundation.pp=2", "train.packs_per_step=2", "data.pack_tokens=96"]


@pytest.fixture(autouse=True)
def _same_share_of_the_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets as much of busy cores as the run; where other tests run beside it, a tenth is minutes."""
    if request.function is not test_the_process_leaves_the_cores_to_the_ranks:
        monkeypatch.setattr(writer, "_NICE", 0)


def contents(checkpoint: Path) -> dict[str, str]:
    """Return what each file of a checkpoint holds. Pickles of equal values may differ, so the index is read."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name not in OF_A_RUN]
    found = {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    index = FileSystemReader(checkpoint / "optimizer").read_metadata()
    return found | {"optimizer/.metadata": str(index.state_dict_metadata)}


def fit(recipe: Path, overrides: Sequence[str]) -> list[int]:
    """Train, and return the steps whose checkpoints this process wrote itself."""
    written, write = [], save.write_snapshot

    def noted(store: CheckpointStore, snapshot: Snapshot, peers: Peers) -> Path:
        written.append(snapshot.step)
        return write(store, snapshot, peers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_snapshot", noted)
        patch.setattr(writer, "_NICE", 0)
        Trainer(load(recipe, *overrides)).fit()
    return written


def assert_saved_as_if_training_had_waited(tmp_path: Path, steps: Sequence[int]) -> None:
    assert losses(tmp_path / "background") == losses(tmp_path / "waited")
    for step in steps:
        background, waited = (tmp_path / run / "checkpoints" / f"step-{step:08d}" for run in ("background", "waited"))
        verify(background)
        assert contents(background) == contents(waited)


def runs(tmp_path: Path) -> list[list[str]]:
    background = ["train.save.background=true", f"output_dir={tmp_path / 'background'}"]
    return [
        background,
        [f"output_dir={tmp_path / 'waited'}"],
        ["train.save.every=null", f"output_dir={tmp_path / 'unsaved'}"],
    ]


@pytest.mark.second
def test_checkpoints_are_those_of_a_run_that_waits_and_losses_those_of_a_run_without_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen files, which are links, included; weights change while a checkpoint is written."""
    monkeypatch.setattr(save, "files_of", partial(save.files_of, file_bytes=1))  # a file for each block
    recipe = tiny_recipe(tmp_path, steps=5, save={"every": 2, "keep_last": 9})
    frozen = "parallel.components.foundation.freeze=true"
    written = [fit(recipe, [frozen, *overrides]) for overrides in runs(tmp_path)]
    assert written == [[5], [2, 4, 5], [5]]
    assert_saved_as_if_training_had_waited(tmp_path, [2, 4, 5])
    assert losses(tmp_path / "background") == losses(tmp_path / "unsaved")
    first, second = (tmp_path / "background" / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    assert sum(file.samefile(second / file.name) for file in first.glob("*.safetensors")) >= 2


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="dp2", marks=pytest.mark.second),
        pytest.param(PP2, id="pp2", marks=pytest.mark.slow),
        pytest.param(
            ["parallel.sections={towers: {components: [image_encoder], ranks: 1}}"],
            id="section",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_write_together(ranks: RankPool, tmp_path: Path, layout: list[str]) -> None:
    settings = {"steps": 5, "save": {"every": 2, "keep_last": 9}, "packs_per_step": 2}
    recipe = tiny_recipe(tmp_path, text_only=not layout, **settings)
    arguments = [[*layout, *overrides] for overrides in runs(tmp_path)[:2]]
    written = [ranks.run(fit, recipe, overrides, timeout_s=120, world=2) for overrides in arguments]
    assert written == [2 * [[5]], 2 * [[2, 4, 5]]]
    assert_saved_as_if_training_had_waited(tmp_path, [2, 4, 5])


def test_a_failure_ends_the_run_at_the_next_step_and_it_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """A file lies where the folder of step 4 has to be made."""
    recipe = tiny_recipe(tmp_path, text_only=True, steps=1000, save={"every": 2, "background": True})
    trainer = Trainer(load(recipe))
    checkpoints = tmp_path / "run" / "checkpoints"

    def spoil() -> None:
        while trainer.saver.is_writing:
            time.sleep(0.01)
        checkpoints.rename(tmp_path / "kept")
        checkpoints.write_text("")

    after_step(trainer, 3, spoil)
    with pytest.raises(TrainingError, match=r"step-00000004 cannot be written \(.*File exists.*; .* are free there"):
        trainer.fit()
    assert 4 <= trainer.step < 1000
    checkpoints.unlink()
    (tmp_path / "kept").rename(checkpoints)
    resumed = Trainer(load(recipe, "train.steps=5", "train.save.background=false"), resume=True)
    assert resumed.step == 2
    resumed.fit()


def test_a_wait_for_the_checkpoint_before_is_told_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks: Any = SimpleNamespace(peers=SimpleNamespace(any_of_each=list), is_first=True)
    store: Any = SimpleNamespace(folder_of=str)
    saver = save.Saver(SimpleNamespace(store=store), ranks, None, None, {}, in_background=True)
    saver._begun, saver._writer = 10, SimpleNamespace(is_writing=True, error=None)
    seconds = itertools.count()

    def sleep(_: float) -> None:
        if next(seconds) > 5:
            saver._writer.is_writing = False

    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=sleep)
    monkeypatch.setattr(save, "time", clock)
    assert saver.finish() == "10"
    assert capsys.readouterr().out == "waiting until the checkpoint of step 10 is written\n"


def test_the_process_leaves_the_cores_to_the_ranks() -> None:
    """In a session of its own, Linux would give it the cores of all ranks together, whatever its priority."""
    with contextlib.closing(writer.CheckpointWriter(open_rendezvous())) as started:
        process = started._process.pid
        assert os.getsid(process) == os.getsid(0) and os.getpgid(process) == process
        assert os.getpriority(os.PRIO_PROCESS, process) == os.getpriority(os.PRIO_PROCESS, 0) + 10


def test_the_end_of_the_process_is_told(tmp_path: Path) -> None:
    trainer = Trainer(load(tiny_recipe(tmp_path, text_only=True, steps=1000, save={"every": 2, "background": True})))
    after_step(trainer, 3, lambda: trainer.saver._writer._process.kill())
    told = "the process that writes checkpoints ended with exit code -9; earlier checkpoints are intact"
    with pytest.raises(TrainingError, match=told):
        trainer.fit()


@pytest.mark.second
def test_an_error_of_the_run_lets_a_checkpoint_be_written_to_its_end(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=9, save={"every": 2, "background": True})

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), console.capture() as printed:
        after_step(Trainer(load(recipe)), 3, fail).fit()
    assert "the checkpoint of step 2 is still being written; the run ends after it" in printed.get()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    verify(checkpoint)
    of_run = {file.name: file.read_bytes() for file in (checkpoint / "run").iterdir()}
    assert of_run == {name: (tmp_path / "run" / name).read_bytes() for name in of_run}
    assert set(of_run) == {"recipe.yaml", "layout.json", "environment.json"}


@pytest.mark.second
def test_training_waits_where_another_process_cannot_import_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of a notebook is a reason."""
    of_notebook, files_of = type("Notebook", (dict,), {"__module__": "__main__"}), save.files_of
    monkeypatch.setattr(save, "files_of", lambda *given: replace(files_of(*given), small=of_notebook()))
    trainer = Trainer(load(tiny_recipe(tmp_path, steps=3, save={"every": 1, "background": True})))
    with console.capture() as printed:
        trainer.fit()
    told = "training waits for each checkpoint: no other process can write it: Notebook is defined in the main"
    assert told in " ".join(printed.get().split())
    assert trainer.saver._writer is None and trainer.last_checkpoint.name == "step-00000003"


STARTS_AFTER_THE_END_OF_THE_RUN = """
import fcntl, os, sys, time

if any("run_state.writer" in given for given in sys.orig_argv):
    lives = open({file!r}, "a")
    fcntl.flock(lives, fcntl.LOCK_EX)
    print("starting", file=lives, flush=True)
    run = os.getppid()
    while os.getppid() == run:
        time.sleep(0.01)
"""


def train_until_killed(recipe: Path, hook: str, lives: Path) -> None:
    """``kill -9`` after step 3, while the process that was given the checkpoint of step 2 starts."""

    def kill() -> None:
        while not (lives.is_file() and lives.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    sys.path.insert(0, hook)
    writer._NICE = 0  # of a rank that ends
    after_step(Trainer(load(recipe)), 3, kill).fit()


def wait_for_its_end(lives: Path) -> None:
    """Wait for the process that locks a file; the system frees the lock as soon as the process has ended."""
    until = time.monotonic() + 60
    with lives.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < until, "the process did not end with its run"
                time.sleep(0.05)


@pytest.mark.second
def test_a_process_that_still_starts_when_its_run_is_killed_ends_and_writes_nothing(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It could: it has the memory with the whole checkpoint, and the message about it."""
    recipe = tiny_recipe(tmp_path, text_only=True, steps=9, save={"every": 2, "background": True})
    hook, lives = tmp_path / "hook", tmp_path / "lives"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(STARTS_AFTER_THE_END_OF_THE_RUN.format(file=str(lives)))
    with pytest.raises(RankError, match="rank 0 died with exit code -9"):
        ranks.run(train_until_killed, recipe, str(hook), lives, timeout_s=120, world=1)
    wait_for_its_end(lives)
    assert (tmp_path / "run" / "metrics.jsonl").is_file() and not list((tmp_path / "run").rglob("*step-*"))


KILLS_AT_AN_ACCESS = """
import os, signal, sys
folder, file = {folder!r}, {file!r}
accesses = 0

def count(event, arguments):
    global accesses
    if any(isinstance(given, (str, os.PathLike)) and str(given).startswith(folder) for given in arguments):
        accesses += 1
        if accesses == {at}:
            for process in {victims}:
                os.kill(process, signal.SIGKILL)
        if {at} == 0:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, str(accesses).encode())
            os.close(descriptor)

if any("run_state.writer" in given for given in sys.orig_argv):
    sys.addaudithook(count)
"""
VICTIMS = {"run": "[os.getppid()]", "writer": "[os.getpid()]", "both": "[os.getppid(), os.getpid()]"}


def train(recipe: Path, overrides: list[str], hook: str, killed_rank: int) -> None:
    """Train with ``hook`` as the first module that the process that writes imports, on one rank."""
    trainer = Trainer(load(recipe, *overrides), resume="auto")
    if trainer.ranks.peers.rank == killed_rank:
        sys.path.insert(0, hook)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "_NICE", 0)
            trainer.fit()
    finally:
        if hook in sys.path:
            sys.path.remove(hook)


@pytest.mark.parametrize(
    ("world", "layout", "kills"),
    [
        pytest.param(1, [], 1, id="one_process", marks=pytest.mark.second),
        pytest.param(1, [], 35, id="35_of_one_process", marks=pytest.mark.slow),
        pytest.param(2, [], 10, id="10_of_two_ranks", marks=pytest.mark.slow),
        pytest.param(2, PP2, 5, id="5_of_pp2", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_at_any_moment_of_a_save_goes_on_from_a_whole_checkpoint(
    ranks: RankPool, tmp_path: Path, world: int, layout: list[str], kills: int
) -> None:
    """``kill -9`` of a rank, of its process that writes, or of both, when that one accesses a path of the run."""
    steps = 3 + 2 * kills
    recipe = tiny_recipe(
        tmp_path,
        text_only=True,
        steps=steps,
        save={"every": 1, "keep_every": 4, "background": True},
        packs_per_step=world,
    )
    whole, run, hook = tmp_path / "whole", tmp_path / "run", tmp_path / "hook"
    hook.mkdir()

    def start(folder: Path, killed_at: int, victims: str = "run", rank: int = 0) -> None:
        text = KILLS_AT_AN_ACCESS.format(
            folder=str(folder), file=str(tmp_path / "accesses"), at=killed_at, victims=VICTIMS[victims]
        )
        (hook / "sitecustomize.py").write_text(text)
        overrides = [*layout, f"output_dir={folder}"]
        ranks.run(train, recipe, overrides, str(hook), rank, timeout_s=200, world=world)

    start(whole, 0)
    accesses = int((tmp_path / "accesses").read_text())
    draw, killed = random.Random(0), 0
    while killed < kills:
        at, victims = draw.randint(1, 2 * accesses // steps), draw.choice(list(VICTIMS))  # in two saves of each start
        with pytest.raises((RankError, TrainingError)):
            start(run, at, victims, draw.randrange(world))
        killed += 1
        for checkpoint in (run / "checkpoints").glob("step-*"):
            verify(checkpoint)
    start(run, 0)
    assert_equal_runs(run, whole)
    assert sorted(path.name for path in run.rglob("*")) == sorted(path.name for path in whole.rglob("*"))
