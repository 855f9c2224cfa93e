"""Checkpoints that a crash cannot half-write: temporary folder, checksums, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from omnitrain.checkpoint.shared import require_seen
from omnitrain.errors import TrainingError, UserError
from omnitrain.peers import SINGLE_PROCESS, Peers, all_or_raise

T = TypeVar("T")

_MANIFEST = "manifest.json"
_OF_A_DISK = (OSError, SafetensorError, RuntimeError)  # of a full one, torch.save makes the last
_STEP = re.compile(r"step-\d{8}")


class CheckpointStore:
    """The checkpoints of one run, ``FOLDER/step-00000100`` and so on.

    A folder of that name is complete: it appears by one rename, after its files and their checksums were written.
    """

    def __init__(self, folder: str | Path, keep: int) -> None:
        """``keep``: newest checkpoints that stay."""
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, write: Callable[[Path], None], peers: Peers = SINGLE_PROCESS) -> Path:
        """Commit what ``write(temporary_folder)`` writes as the checkpoint of ``step``.

        Args:
            step: optimizer steps done.
            write: writes this rank's files, perhaps together with the others. What it raises on one rank alone is
                raised at once: nobody asks the others, who may be waiting for that rank inside of ``write``.
            peers: the ranks of the run, which all call this.

        Returns:
            The committed folder.

        Raises:
            TrainingError: the disk is full, or cannot be written; checkpoints saved before stay as they are.
        """
        final = self.folder_of(step)
        temporary = self._unfinished(final)
        is_first = peers.rank == 0

        def on_all(work: Callable[[], T]) -> T:
            return all_or_raise(peers, lambda: self._told(work, final))

        try:
            on_all(lambda: _make_empty(temporary) if is_first else None)
            self._told(lambda: write(temporary), final)
            names = set().union(*peers.gather(on_all(lambda: _files_in(temporary))))  # a share may be slow to list some
            checksums = peers.gather(on_all(lambda: _settled(_share(sorted(names), peers), temporary)))
            on_all(lambda: self._commit(temporary, final, checksums) if is_first else None)
        except Exception:
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _told(self, work: Callable[[], T], final: Path) -> T:
        try:
            return work()
        except Exception as error:
            if not isinstance(error, _OF_A_DISK) and type(error) is not Exception:  # tokenizers have none of their own
                raise
            told = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"{told}; {_free_mib(self.folder):,} MiB are free there"
            raise TrainingError(f"{final} cannot be written ({reason}); checkpoints saved before are intact") from error

    def _commit(self, temporary: Path, final: Path, checksums: list[dict[str, str]]) -> None:
        manifest = dict(sorted(entry for part in checksums for entry in part.items()))
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        folders = [path for path in temporary.rglob("*") if path.is_dir()]
        for path in (temporary / _MANIFEST, *folders, temporary):  # a folder holds the names of its files
            _sync(path)
        replaced = [_put_aside(final)] if final.exists() else []
        temporary.rename(final)
        _sync(self.folder)
        for leaving in (*replaced, *(_put_aside(old) for old in self._steps()[: -self.keep])):
            shutil.rmtree(leaving, ignore_errors=True)

    def _unfinished(self, final: Path) -> Path:
        return self.folder / f".{final.name}.partial"

    def clear_unfinished(self) -> None:
        """Remove what unfinished saves and removals left behind. Only the run that owns the folder may call it."""
        for unfinished in self.folder.glob(".step-*.partial"):
            if unfinished.is_symlink():  # to a checkpoint that a user has moved: it stays where it is
                unfinished.unlink()
            else:
                shutil.rmtree(unfinished)

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies once it is committed."""
        return self.folder / f"step-{step:08d}"

    def latest(self, peers: Peers = SINGLE_PROCESS) -> Path:
        """The newest checkpoint that rank 0 sees, checked against its checksums by ``peers``, which all call this.

        Raises:
            UserError: there is none, a file of it was damaged, or the ranks do not share the folder.
        """
        names = peers.gather(all_or_raise(peers, lambda: self.newest().name if peers.rank == 0 else ""))
        newest = self.folder / names[0]
        require_seen(newest, self.folder, peers)
        verify(newest, peers)
        return newest

    def newest(self) -> Path:
        """The checkpoint of the most steps.

        Raises:
            UserError: there is none.
        """
        if not (steps := self._steps()):
            raise UserError(f"nothing to resume: no checkpoint in {self.folder}")
        return steps[-1]

    def _steps(self) -> list[Path]:
        """Not what a user has put beside them, such as a copy of one under another name."""
        return sorted(path for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir())


def verify(checkpoint: Path, peers: Peers = SINGLE_PROCESS, unread: str | None = None) -> None:
    """Compare a checkpoint's files with its manifest.

    Args:
        checkpoint: its folder.
        peers: ranks that share the work; all of them call this.
        unread: a folder in it, of which nothing will be read: its files are not compared.

    Raises:
        UserError: names every file that is missing or differs.
    """
    damaged = peers.gather(all_or_raise(peers, lambda: _damaged(checkpoint, peers, unread)))
    if names := sorted(name for part in damaged for name in part):
        if not checkpoint.is_dir():
            raise UserError(
                f"checkpoint {checkpoint} was removed while it was read: its run goes on, and keeps as many as "
                "train.keep_checkpoints says; read the newest one again, or a copy"
            )
        raise UserError(f"checkpoint {checkpoint} is damaged: {names} do not match {_MANIFEST}; remove the folder")


def require_as_saved(checkpoint: Path, unread: str | None = None) -> None:
    """:func:`verify`, if the checkpoint has a manifest: a model that was saved by itself has none."""
    if (checkpoint / _MANIFEST).is_file():
        verify(checkpoint, unread=unread)


def _damaged(checkpoint: Path, peers: Peers, unread: str | None) -> list[str]:
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint} is damaged: {error}; remove the folder") from None
    names = sorted(name for name in manifest if Path(name).parts[0] != unread)
    return [
        name
        for name in _share(names, peers)
        if not (checkpoint / name).is_file() or _checksum(checkpoint / name) != manifest[name]
    ]


def newest_checkpoint(path: str | Path) -> Path:
    """``path`` itself if it is a checkpoint, else the newest one of the run in it. Its files are not compared.

    Raises:
        UserError: neither.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        if not (path / "checkpoints").is_dir():
            raise UserError(f"{path} is neither a saved omni model (config.json) nor a run folder with checkpoints")
        path = CheckpointStore(path / "checkpoints", keep=1).newest()
    return path


def _put_aside(checkpoint: Path) -> Path:
    """What interrupts its removal leaves no half of a checkpoint."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.leaving.partial"))


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _files_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _share(names: Sequence[str], peers: Peers) -> Sequence[str]:
    """Those that this rank is to look after."""
    return names[peers.rank :: peers.size]


def _settled(names: Sequence[str], folder: Path) -> dict[str, str]:
    """File -> checksum of what is on the disk for good."""
    for name in names:
        _sync(folder / name)
    return {name: _checksum(folder / name) for name in names}


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
