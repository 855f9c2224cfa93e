"""Checkpoints that a crash cannot half-write: temporary folder, checksums, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from omnitrain.errors import TrainingError, UserError

_MANIFEST = "manifest.json"


class CheckpointStore:
    """The checkpoints of one run, ``FOLDER/step-00000100`` and so on.

    A folder of that name is complete: it appears by one rename, after its files and their checksums were written.
    """

    def __init__(self, folder: str | Path, keep: int) -> None:
        """``keep``: newest checkpoints that stay."""
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Commit what ``write(temporary_folder)`` writes as the checkpoint of ``step``.

        Returns:
            The committed folder.

        Raises:
            TrainingError: the disk is full, or cannot be written; checkpoints saved before stay as they are.
        """
        final = self.folder_of(step)
        try:
            self._commit(final, write)
        except (OSError, SafetensorError, RuntimeError) as error:  # of a full disk, torch.save makes the last
            reason = f"{str(error).splitlines()[0]}; {_free_mib(self.folder):,} MiB are free there"
            shutil.rmtree(self._unfinished(final), ignore_errors=True)
            raise TrainingError(f"{final} cannot be written ({reason}); checkpoints saved before are intact") from error
        for old in self._steps()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def _commit(self, final: Path, write: Callable[[Path], None]) -> None:
        temporary = self._unfinished(final)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        manifest = {str(f.relative_to(temporary)): _checksum(f) for f in sorted(temporary.rglob("*")) if f.is_file()}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*temporary.rglob("*"), temporary):  # a folder too: it holds the names of its files
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(self.folder)

    def _unfinished(self, final: Path) -> Path:
        return self.folder / f".{final.name}.partial"

    def clear_unfinished(self) -> None:
        """Remove what saves that never finished left behind. Only the run that owns the folder may call it."""
        for unfinished in self.folder.glob(".step-*.partial"):
            shutil.rmtree(unfinished)

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies once it is committed."""
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path:
        """The newest checkpoint, checked against its checksums.

        Raises:
            UserError: there is none, or a file of it was damaged.
        """
        steps = self._steps()
        if not steps:
            raise UserError(f"nothing to resume: no checkpoint in {self.folder}")
        verify(steps[-1])
        return steps[-1]

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint's files with its manifest.

    Raises:
        UserError: names every file that is missing or differs.
    """
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint} is damaged: {error}; remove the folder") from None
    damaged = [
        name
        for name, checksum in manifest.items()
        if not (checkpoint / name).is_file() or _checksum(checkpoint / name) != checksum
    ]
    if damaged:
        raise UserError(f"checkpoint {checkpoint} is damaged: {damaged} do not match {_MANIFEST}; remove the folder")


def newest_checkpoint(path: str | Path) -> Path:
    """``path`` itself if it is a checkpoint, else the newest one of the run in it.

    Raises:
        UserError: neither.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        if (path / _MANIFEST).is_file():
            verify(path)
        return path
    if (path / "checkpoints").is_dir():
        return CheckpointStore(path / "checkpoints", keep=1).latest()
    raise UserError(f"{path} is neither a saved omni model (config.json) nor a run folder with checkpoints")


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _free_mib(folder: Path) -> int:
    """Space left; what torch raises does not tell that a disk is full."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free // 2**20


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
