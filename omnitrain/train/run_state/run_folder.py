"""The folder of a run: ``recipe.yaml``, metrics, checkpoints, evaluation."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, Literal, TextIO

from omnitrain.checkpoint.store import (
    CheckpointStore,
    Retention,
    existing,
    free_bytes,
    require_seen,
    size_text,
    step_of,
    verify,
)
from omnitrain.data.packing.sample import Rejected
from omnitrain.errors import DamagedCheckpointError, TrainingError, UserError
from omnitrain.peers import Peers, all_or_raise
from omnitrain.recipe import Recipe, save_recipe
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.meter import StopWatcher, read_lines

LOCK_FILE = ".lock"  # the file is never removed; only a process's lock on it counts


class FolderLock:
    """A lock, on a shared disk for all machines, until released or this process ends; none where disks lack it."""

    def __init__(self) -> None:
        self._stream: TextIO | None = None

    def take(self, folder: Path) -> None:
        """Lock ``folder``, which must exist; raise a UserError if another process holds it. Release an earlier one."""
        stream = (folder / LOCK_FILE).open("a+")
        try:
            _lock(stream, fcntl.LOCK_EX, folder)
        except UserError:
            stream.close()
            raise
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        self.release()
        self._stream = stream

    def release(self) -> None:
        """Release the lock."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def require_free(folder: Path) -> None:
    """Raise a UserError if another process holds ``folder``, which may not exist. Nothing is written."""
    if (folder / LOCK_FILE).is_file():
        with (folder / LOCK_FILE).open() as stream:
            _lock(stream, fcntl.LOCK_SH, folder)


def _lock(stream: TextIO, kind: int, folder: Path) -> None:
    try:
        fcntl.lockf(stream, kind | fcntl.LOCK_NB)  # belongs to this process; forked processes do not inherit it
    except (BlockingIOError, PermissionError):
        stream.seek(0)
        raise UserError(
            f"output_dir: a run ({stream.read()}) writes to {str(folder)!r}; wait for its end, or use another folder"
        ) from None
    except OSError:  # a file system without locks
        pass


_UNFINISHED_RECIPE = "recipe.yaml.tmp"  # what save_recipe leaves if it is killed

Resume = bool | Literal["auto"]


class RunFolder:
    """The folder that a run writes to, and the ``store`` of its checkpoints. Nothing is written before :meth:`open`."""

    def __init__(self, recipe: Recipe) -> None:
        """Check ``recipe.output_dir``: a UserError if it cannot be created, or has files that belong to no run."""
        self.recipe, self.path = recipe, Path(recipe.output_dir)
        kept = Retention(recipe.train.save.keep_last, recipe.train.save.keep_every, recipe.train.save.keep_best)
        self.store = CheckpointStore(self.path / "checkpoints", kept)
        self._lock = FolderLock()
        _require_writable(self.path)

    def checkpoint_to_resume(self, peers: Peers, resume: Resume) -> Path | None:
        """Return the checkpoint that the run continues from. None: it starts. All ``peers`` call this.

        ``resume``: True: from the newest checkpoint; "auto": from the newest intact one, if there is one; False: start.
        Raises UserError: no checkpoint exists, it is damaged (with "auto": all are), or the run was started with
        another recipe.
        """
        if resume is False:
            return None
        all_or_raise(peers, self._require_same_run)  # before checksums, which may take minutes
        if resume is True:
            return self.store.latest(peers)
        checkpoint = self.store.latest_intact(peers)
        for damaged, files in self.store.damaged.items():
            console.print(f"checkpoint {damaged} is damaged: {list(files)}; the one before it is used", soft_wrap=True)
        return checkpoint

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint exists, perhaps a damaged one."""
        return self._steps_saved() > 0

    def _require_same_run(self) -> None:
        begun = self.path / "recipe.yaml"
        if begun.is_file():  # otherwise no checkpoint exists either
            require_same_run(Recipe.load(str(begun)), self.recipe, self.path)

    def finished(self) -> str | None:
        """Return that the run here has done its steps and evaluation, and is intact; None: it has not."""
        self._require_same_run()
        steps, (done, evaluated) = self.recipe.train.steps, (self._steps_saved(), self._steps_evaluated())
        stopped = None  # why the run ended before its last step
        if (settings := self.recipe.train.early_stopping) is not None:
            lines = map(json.loads, read_lines(self.path / "metrics.jsonl", done))
            stopped = StopWatcher(settings, lines).reason
        if (done < steps and stopped is None) or (self.recipe.evaluation is not None and evaluated != done):
            return None
        try:
            verify(self.store.newest())
        except DamagedCheckpointError:
            return None
        why, key = ("", "train.steps") if done >= steps else (f" ({stopped})", "train.early_stopping.patience")
        return (
            f"{self.path} is finished: {done} of {steps} steps are done{why}; nothing was changed; a larger {key} "
            "trains on"
        )

    def _steps_saved(self) -> int:
        try:
            return step_of(self.store.newest())
        except UserError:
            return 0

    def _steps_evaluated(self) -> int | None:
        """Return the steps of the model in ``eval.json``. None: it is missing or cut, or its evaluation is another."""
        begun, scores = self.path / "recipe.yaml", self.path / "eval.json"
        if not (begun.is_file() and scores.is_file()):
            return None
        old = Recipe.load(str(begun))
        is_same = (old.evaluation, old.data.heldout) == (self.recipe.evaluation, self.recipe.data.heldout)
        try:
            return json.loads(scores.read_text()).get("step") if is_same else None
        except ValueError:  # the run was killed while it wrote
            return None

    def open(self, resumed: bool, checkpoint_bytes: int) -> None:
        """Create and lock the folder, as ``resumed`` or new; UserError: another run is there, or no room."""
        self._checkpoint_bytes = checkpoint_bytes
        try:
            if resumed:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock.take(self.path)
                self.store.require_no_other()
                for aside in self.store.set_damaged_aside():
                    console.print(f"a damaged checkpoint is now in {aside}", soft_wrap=True)
                self.store.clear_unfinished()  # files of a crashed save take the space of a checkpoint
            _require_space(self.path, checkpoint_bytes)
            if not resumed:
                self._make()
            self.save_recipe(self.recipe)
        except OSError as error:
            raise UserError(f"output_dir: {str(self.path)!r} cannot be written: {error}; use another folder") from None

    def _make(self) -> None:
        if (self.path / "recipe.yaml").is_file():
            self._lock.take(self.path)
            self._move_aside()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take(self.path)

    def _move_aside(self) -> None:
        target = self.path.resolve()  # a link stays, and its target is renamed
        if Path.cwd().is_relative_to(target):
            raise UserError(
                f"output_dir: {str(self.path)!r} has an earlier run, and this command was started inside of it; "
                "start it from another folder, so that the earlier run can be renamed"
            )
        aside = next(p for n in count(1) if not (p := target.with_name(f"{target.name}.old{n}")).exists())
        target.rename(aside)
        target.mkdir()
        console.print(f"{self.path} had an earlier run; it is now in {self.path.with_name(aside.name)}")

    def has_room(self, step: int) -> bool:
        """Return whether the disk has space for the checkpoint of ``step`` and the last one; print if it has not."""
        if self.store.has_room(step, self._checkpoint_bytes):
            return True
        console.print(
            f"step {step} is not saved, because the disk of {self.path} has no space for this checkpoint "
            f"({size_text(self._checkpoint_bytes)}) and the last one"
        )
        return False

    def close(self) -> None:
        """Release the folder for other runs."""
        self._lock.release()

    def require_shared(self, peers: Peers) -> None:
        """Raise a UserError if some ranks have another folder. All of them call this once the folder is open."""
        mark = self.path / f".seen-by-{peers.of_first(uuid.uuid4().hex)}"
        all_or_raise(peers, lambda: mark.touch() if peers.rank == 0 else None)
        try:
            require_seen(mark, self.path, peers)
        finally:
            if peers.rank == 0:
                mark.unlink()

    def save_recipe(self, recipe: Recipe) -> None:
        """Write ``recipe.yaml``, at the start, and when a measured setting is added to it."""
        self.recipe = recipe
        save_recipe(recipe, self.path / "recipe.yaml")

    def list_rejected(self, rejected: Iterable[Rejected]) -> Path:
        """Write ``rejected.jsonl``: the skipped rows, with reasons. A full disk is a TrainingError."""
        return self._written("rejected.jsonl", "".join(json.dumps(asdict(row)) + "\n" for row in rejected))

    def write_scores(self, scores: dict[str, Any]) -> Path:
        """Write ``eval.json``, and a line of ``evaluations.jsonl``, which has all evaluations by steps done."""
        history = self.path / "evaluations.jsonl"
        kept = read_lines(history, scores["step"] - 1)
        self._written(history.name, "".join(f"{line}\n" for line in [*kept, json.dumps(scores)]))
        return self._written("eval.json", json.dumps(scores, indent=2) + "\n")

    def _written(self, name: str, text: str) -> Path:
        file = self.path / name
        try:
            file.write_text(text)
        except OSError as error:
            raise TrainingError(f"{file} cannot be written ({error.strerror}); checkpoints are intact") from error
        return file


def begun_at(recipe: Recipe) -> tuple[int, int] | None:
    """Return what changes when a run begins to write to the folder of ``recipe``. None: it has no run."""
    try:
        found = (Path(recipe.output_dir) / "recipe.yaml").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _require_space(folder: Path, checkpoint_bytes: int) -> None:
    free = free_bytes(folder)
    if free < checkpoint_bytes:
        raise UserError(
            f"output_dir: a checkpoint of this run takes {size_text(checkpoint_bytes)}, but the disk of "
            f"{str(folder)!r} has {size_text(free)} free; free some space, or use another folder"
        )


def _require_writable(folder: Path) -> None:
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if files - {LOCK_FILE, _UNFINISHED_RECIPE} and not (folder / "recipe.yaml").is_file():
        raise UserError(f"output_dir: {str(folder)!r} has files but no run (no recipe.yaml); use a new folder")
    parent = existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"output_dir: {str(folder)!r} cannot be written: {parent} is not a writable folder")


# Keys (with all keys below them) that change neither the order of the data nor the math of an update; train.steps only
# moves the end of the run.
_MAY_CHANGE = (
    *("output_dir", "plugins", "evaluation", "parallel", "model.ops"),
    *("data.heldout", "data.workers", "data.cached_samples"),
    *("train.compile", "train.device", "train.precision", "train.cpu_threads", "train.steps"),
    *("train.log_every", "train.metrics", "train.callbacks", "train.trace", "train.track", "train.report"),
    *("train.save", "train.early_stopping", "train.stop_seconds", "train.stall_seconds"),
)
_LORA_KEYS = re.compile(r"parallel\.(default|components\.[^.]+)\.lora\b")


def require_same_run(begun: Recipe, now: Recipe, folder: Path) -> None:
    """Raise a UserError with all keys that must not change and differ from the recipe with which the run was begun."""
    old, new = (dict(_leaves(recipe.model_dump())) for recipe in (begun, now))
    free = tuple(f"{key}." for key in _MAY_CHANGE)
    different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    keys = [key for key in different if _LORA_KEYS.match(key) or not f"{key}.".startswith(free)]
    if keys:
        changes = [f"  {key}: was {_shown(old, key)}, is {_shown(new, key)}" for key in keys]
        raise UserError("\n".join([f"{folder} was started with another recipe:", *changes, _way_out(folder)]))


def require_same_rows(had: Sequence[int], have: Sequence[int], folder: Path) -> None:
    """Raise a UserError if the number of rows of a training data set changed, because their order would change."""
    pairs = enumerate(zip(had, have, strict=True))
    changes = [f"  data.train.{source}: had {old} rows, has {new}" for source, (old, new) in pairs if old != new]
    if changes:
        raise UserError("\n".join([f"{folder} was started with other data:", *changes, _way_out(folder)]))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(entry, f"{path}.{key}" if path else str(key))


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "unset"


def _way_out(folder: Path) -> str:
    return (
        f"resume it with its own recipe ({folder / 'recipe.yaml'}), or start a new run with another output_dir and "
        f"model.checkpoint={folder}, which starts from the weights of this run"
    )
