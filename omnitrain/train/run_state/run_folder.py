"""The folder of a run: ``recipe.yaml``, metrics, checkpoints, evaluation."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from omnitrain.checkpoint.shared import require_seen
from omnitrain.checkpoint.store import CheckpointStore
from omnitrain.data.sample import Rejected
from omnitrain.errors import TrainingError, UserError
from omnitrain.peers import Peers, all_or_raise
from omnitrain.recipe import Recipe, save_recipe
from omnitrain.train.metrics.display import console
from omnitrain.train.run_state.resume import require_same_run
from omnitrain.train.run_state.run_lock import LOCK_FILE, FolderLock, require_free


class RunFolder:
    """Where a run writes; nothing is written before :meth:`open`.

    Attributes:
        path: the folder.
        store: its checkpoints.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Look at ``recipe.output_dir``.

        Raises:
            UserError: it cannot be made, or holds something else than a run.
        """
        self.recipe, self.path = recipe, Path(recipe.output_dir)
        self.store = CheckpointStore(self.path / "checkpoints", recipe.train.keep_checkpoints)
        self._lock = FolderLock()
        _require_writable(self.path)

    def require_free(self) -> None:
        """No other run writes there; :meth:`open` asks again, but perhaps minutes later.

        Raises:
            UserError: one does.
        """
        require_free(self.path)

    def checkpoint_to_resume(self, peers: Peers) -> Path:
        """The newest checkpoint of the run in this folder.

        Args:
            peers: the ranks of the run, which all call this.

        Raises:
            UserError: there is none, it is damaged, or the run was begun with another recipe.
        """
        all_or_raise(peers, self._require_same_run)  # told before checksums are taken, which may last minutes
        return self.store.latest(peers)

    def _require_same_run(self) -> None:
        begun = self.path / "recipe.yaml"
        if begun.is_file():  # else there is no checkpoint either
            require_same_run(Recipe.load(str(begun)), self.recipe, self.path)

    def open(self, resumed: bool, checkpoint_bytes: int) -> None:
        """Make the folder, which is this process's until :meth:`close`. A new run moves an older one aside.

        Args:
            resumed: whether the run that is there goes on.
            checkpoint_bytes: of each checkpoint.

        Raises:
            UserError: another run writes there, the system does not let us, or there is no space for a checkpoint.
        """
        try:
            if resumed:
                self._lock.take(self.path)
                self.store.clear_unfinished()  # what a crashed save left takes the space of a checkpoint
            _require_space(self.path, checkpoint_bytes)
            if not resumed:
                self._make()
            self.save_recipe(self.recipe)
        except OSError as error:
            raise UserError(f"output_dir: {str(self.path)!r} cannot be written: {error}; name another folder") from None

    def _make(self) -> None:
        if (self.path / "recipe.yaml").is_file():
            self._lock.take(self.path)
            self._move_aside()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take(self.path)

    def _move_aside(self) -> None:
        there = self.path.resolve()  # behind a link, which stays
        if Path.cwd().is_relative_to(there):
            raise UserError(
                f"output_dir: {str(self.path)!r} holds an earlier run, and this command was started inside of it; "
                "start it from another folder, which lets that run be moved aside"
            )
        aside = next(p for n in count(1) if not (p := there.with_name(f"{there.name}.old{n}")).exists())
        there.rename(aside)
        there.mkdir()
        console.print(f"{self.path} held an earlier run; it is now {self.path.with_name(aside.name)}")

    def close(self) -> None:
        """Another run may write there."""
        self._lock.release()

    def require_shared(self, peers: Peers) -> None:
        """All ranks, which all call this once the folder is open, have the same one.

        Raises:
            UserError: some do not.
        """
        mark = self.path / f".seen-by-{peers.gather(uuid.uuid4().hex)[0]}"
        all_or_raise(peers, lambda: mark.touch() if peers.rank == 0 else None)
        try:
            require_seen(mark, self.path, peers)
        finally:
            if peers.rank == 0:
                mark.unlink()

    def save_recipe(self, recipe: Recipe) -> None:
        """Write ``recipe.yaml``; at the start, and when something was measured that belongs into it."""
        self.recipe = recipe
        save_recipe(recipe, self.path / "recipe.yaml")

    def list_rejected(self, rejected: Iterable[Rejected]) -> Path:
        """Write ``rejected.jsonl``: rows that were skipped, and why.

        Raises:
            TrainingError: the disk is full, or cannot be written.
        """
        return self._written("rejected.jsonl", "".join(json.dumps(asdict(row)) + "\n" for row in rejected))

    def write_scores(self, scores: dict[str, Any]) -> Path:
        """Write ``eval.json``.

        Raises:
            TrainingError: the disk is full, or cannot be written.
        """
        return self._written("eval.json", json.dumps(scores, indent=2) + "\n")

    def _written(self, name: str, text: str) -> Path:
        file = self.path / name
        try:
            file.write_text(text)
        except OSError as error:
            raise TrainingError(f"{file} cannot be written ({error.strerror}); checkpoints are intact") from error
        return file


def _require_space(folder: Path, checkpoint_bytes: int) -> None:
    free = shutil.disk_usage(_existing(folder)).free
    if free < checkpoint_bytes:
        needed, left = (f"{number / 2**30:,.1f} GiB" for number in (checkpoint_bytes, free))
        raise UserError(
            f"output_dir: a checkpoint of this run takes {needed}, and {left} are free where {str(folder)!r} is; make "
            "room, or name another folder"
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _require_writable(folder: Path) -> None:
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if files - {LOCK_FILE} and not (folder / "recipe.yaml").is_file():
        raise UserError(f"output_dir: {str(folder)!r} holds files and no run (no recipe.yaml); name a new folder")
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"output_dir: {str(folder)!r} cannot be written: {existing} is no folder that we may write to")
