"""Write checkpoints atomically: temporary folder, checksums, fsync, rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from omnitrain.errors import DamagedCheckpointError, TrainingError, UserError
from omnitrain.peers import SINGLE_PROCESS, Peers, all_or_raise

_GIB = 2**30


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk of ``folder``, which may not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def size_text(size: int) -> str:
    """Return a number of bytes in MiB, from one GiB on in GiB."""
    return f"{size / 2**20:,.1f} MiB" if size < _GIB else f"{size / _GIB:,.1f} GiB"


def set_default_modes(files: Iterable[Path]) -> None:
    """Give files the permissions of a plain ``open`` in their folder; safetensors lets only their owner read them."""
    defaults: dict[Path, int] = {}
    for file in files:
        with contextlib.suppress(OSError):  # a file system without permissions
            if file.parent not in defaults:
                defaults[file.parent] = _mode_of_new_file(file.parent)
            if defaults[file.parent] & ~file.stat().st_mode:
                file.chmod(defaults[file.parent])


def _mode_of_new_file(folder: Path) -> int:
    """Open a file, since its mode follows the umask, which cannot be read without changing it, and the folder's ACL."""
    probe = folder / f".mode-{uuid.uuid4().hex}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mode & 0o666
    finally:
        probe.unlink(missing_ok=True)


T = TypeVar("T")

_MANIFEST = "manifest.json"
_METRICS = "metrics.json"
_DISK_ERRORS = (OSError, SafetensorError, RuntimeError)  # torch.save raises RuntimeError if the disk is full
_STEP = re.compile(r"step-\d{8}")
_TIMEOUT_S = 60.0  # network file systems may cache a folder's listing for this long
_POLL_S = 0.5


@dataclass(frozen=True)
class Retention:
    """The rule after which checkpoints are removed."""

    last: int = 2  # number of newest checkpoints that stay
    every: int | None = None  # checkpoints after a multiple of so many steps stay forever
    best: str | None = None  # the checkpoint with the lowest value of this metric of ``metrics.jsonl`` stays

    def leaving(self, values: Mapping[int, float | None]) -> list[int]:
        """Return the steps to remove, of step -> metric (None: not measured); of equal bests the first stays."""
        steps = sorted(values)
        stay = set(steps[-self.last :])
        if self.every is not None:
            stay |= {step for step in steps if step % self.every == 0}
        measured = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        if self.best is not None and measured:
            stay.add(min(measured, key=lambda step: (measured[step], step)))
        return [step for step in steps if step not in stay]


class CheckpointStore:
    """The checkpoints of one run, ``FOLDER/step-00000100`` and so on.

    A folder of that name is always complete: a rename creates it after all files and their checksums are written. Each
    save removes the checkpoints that do not stay by ``retention``.
    """

    def __init__(self, folder: str | Path, retention: Retention | None = None) -> None:
        self.folder, self.retention = Path(folder), retention or Retention()
        self.last: Path | None = None  # that this process saved or verified
        self.saved: Path | None = None  # the last that this process saved
        self.damaged: dict[Path, tuple[str, ...]] = {}  # newer than `latest_intact` -> damaged files; newest first

    def save(self, step: int, write: Callable[[Path], None], peers: Peers = SINGLE_PROCESS) -> Path:
        """Call ``write(temporary_folder)`` and commit the files as the checkpoint of ``step``. All ``peers`` call this.

        ``write`` writes this rank's files; it may use collectives, so an error in it is raised at once, without asking
        other ranks. Raises TrainingError: the disk is full or not writable. Earlier checkpoints stay intact.
        """
        final = self.folder_of(step)
        temporary = self.folder / f".{final.name}.partial"
        is_first = peers.rank == 0

        def on_all(work: Callable[[], T]) -> T:
            return all_or_raise(peers, lambda: self._with_disk_errors(work, final))

        try:
            on_all(lambda: _make_empty(temporary) if is_first else None)
            self._with_disk_errors(lambda: write(temporary), final)
            on_all(lambda: None)  # all have written what they list
            listed = on_all(lambda: [str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file()])
            of_first = peers.of_first(listed)  # others tell what it lacks: a network disk may be late
            names = sorted({*of_first, *chain.from_iterable(peers.gather(sorted(set(listed).difference(of_first))))})
            own = _names_of_rank(names, peers)
            checksums = peers.gather_on_first(on_all(lambda: _synced_checksums(own, temporary, self.saved)))
            on_all(lambda: self._commit(temporary, final, checksums) if is_first else None)
        except Exception:
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.last = self.saved = final
        return final

    def _with_disk_errors(self, work: Callable[[], T], final: Path) -> T:
        """Call ``work`` and turn errors of the disk into a TrainingError with the free space."""
        try:
            return work()
        except Exception as error:
            if (
                not isinstance(error, _DISK_ERRORS) and type(error) is not Exception
            ):  # tokenizers raises plain Exception
                raise
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"{first_line}; {size_text(free_bytes(self.folder))} are free there"
            earlier = "earlier checkpoints are intact" if self.folder.is_dir() else f"{self.folder} is gone"
            raise TrainingError(f"{final} cannot be written ({reason}); {earlier}") from error

    def _commit(self, temporary: Path, final: Path, checksums: list[dict[str, str]]) -> None:
        manifest = dict(sorted(entry for of_rank in checksums for entry in of_rank.items()))
        manifest[_MANIFEST] = _digest(manifest)
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        folders = [path for path in temporary.rglob("*") if path.is_dir()]
        for path in (temporary / _MANIFEST, *folders, temporary):  # fsync of a folder makes its file names durable
            _sync(path)
        replaced = [_put_aside(final)] if final.exists() else []
        temporary.rename(final)
        _sync(self.folder)
        leaving = self.retention.leaving({step_of(old): self._value(old) for old in self._steps()})
        for removed in (*replaced, *(_put_aside(self.folder_of(step)) for step in leaving)):
            shutil.rmtree(removed, ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove the files of interrupted saves and removals. Only the run that owns the folder may call this."""
        for unfinished in self.folder.glob(".step-*.partial"):
            if unfinished.is_symlink():  # it points to a checkpoint that a user has moved, which stays
                unfinished.unlink()
            else:
                shutil.rmtree(unfinished)

    def folder_of(self, step: int) -> Path:
        """Return the folder of the committed checkpoint of ``step``."""
        return self.folder / f"step-{step:08d}"

    def has_room(self, step: int, size: int) -> bool:
        """Return whether the disk has space for the checkpoint of ``step``, of ``size`` bytes, and for the next one."""
        values = {step_of(checkpoint): self._value(checkpoint) for checkpoint in self._steps()}
        is_one_removed = bool(self.retention.leaving(values | {step: None}))
        return free_bytes(self.folder) >= (size if is_one_removed else 2 * size)

    def latest(self, peers: Peers = SINGLE_PROCESS) -> Path:
        """Return the newest checkpoint that rank 0 sees, after verifying its checksums. All ``peers`` call this."""
        name = peers.of_first(all_or_raise(peers, lambda: self.newest().name if peers.rank == 0 else ""))
        return self._verified(name, peers)

    def latest_intact(self, peers: Peers = SINGLE_PROCESS) -> Path | None:
        """Return the newest intact checkpoint that rank 0 sees, or None. All ``peers`` call this.

        Newer ones are in :attr:`damaged` then, until :meth:`set_damaged_aside`. Raises DamagedCheckpointError: all are
        damaged; UserError: the ranks do not share the folder.
        """
        names = peers.of_first([checkpoint.name for checkpoint in self._steps()] if peers.rank == 0 else [])
        for name in reversed(names):
            try:
                return self._verified(name, peers)
            except DamagedCheckpointError as error:
                self.damaged[self.folder / name] = error.files
        if not self.damaged:
            return None
        found = "; ".join(f"{checkpoint.name}: {list(files)}" for checkpoint, files in self.damaged.items())
        raise DamagedCheckpointError(
            f"all checkpoints in {self.folder} are damaged ({found}); start a new run with another output_dir"
        )

    def _verified(self, name: str, peers: Peers) -> Path:
        checkpoint = self.folder / name
        require_seen(checkpoint, self.folder, peers)
        verify(checkpoint, peers)
        self.last = checkpoint
        return checkpoint

    def set_damaged_aside(self) -> list[Path]:
        """Rename the checkpoints in :attr:`damaged`, so that they are none any more. Return their new folders."""
        aside = [_renamed(found, found.with_name(f"{found.name}.damaged")) for found in self.damaged]
        self.damaged = {}
        return aside

    def require_no_other(self) -> None:
        """Raise a UserError if another run has saved here since this process chose where it continues."""
        newer = [checkpoint for checkpoint in self._steps() if checkpoint not in self.damaged]
        if newer and newer[-1] != self.last:
            raise UserError(
                f"output_dir: another run has saved {newer[-1]} while this one started; start it again to continue "
                "from there"
            )

    def newest(self) -> Path:
        """Return the checkpoint with the most steps; raise a UserError if there is none."""
        if not (steps := self._steps()):
            raise UserError(f"nothing to resume: no checkpoint in {self.folder}")
        return steps[-1]

    def _value(self, checkpoint: Path) -> float | None:
        """Return what decides whether it is the best one. None: nothing does, or the metric has no value in it."""
        return None if self.retention.best is None else metric_of(checkpoint, self.retention.best)

    def _steps(self) -> list[Path]:
        """Return all checkpoints, but no folders that a user added, such as a copy under another name."""
        return sorted(path for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir())


def require_seen(path: Path, folder: Path, peers: Peers) -> None:
    """Wait until all ranks see ``path`` in ``folder``, which rank 0 made; raise a UserError on all if one does not."""
    all_or_raise(peers, lambda: _require_seen(path, folder))


def _require_seen(path: Path, folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"output_dir: {str(folder.absolute())!r} on {socket.gethostname()} is not the folder of rank 0; "
                "every rank writes and reads its shards of a checkpoint: use a folder that all machines share"
            )
        time.sleep(_POLL_S)


def verify(checkpoint: Path, peers: Peers = SINGLE_PROCESS, unread: str | None = None) -> None:
    """Compare the files of a checkpoint, but for its folder ``unread``, with its manifest; ``peers`` divide them."""
    damaged = peers.gather(all_or_raise(peers, lambda: _damaged(checkpoint, peers, unread)))
    if names := sorted({name for of_rank in damaged for name in of_rank}):
        if not checkpoint.is_dir():
            raise UserError(
                f"checkpoint {checkpoint} was removed while it was read: its run is still training and keeps only the "
                "newest train.save.keep_last; read the newest one, or a copy"
            )
        raise DamagedCheckpointError(
            f"checkpoint {checkpoint} is damaged: {names} do not match {_MANIFEST}; use another one: `omnitrain run "
            "--auto-resume` continues from the one before it",
            names,
        )


def require_as_saved(checkpoint: Path, unread: str | None = None) -> None:
    """Call :func:`verify` if the checkpoint has a manifest. A model saved outside of a run has none."""
    if (checkpoint / _MANIFEST).is_file():
        verify(checkpoint, unread=unread)


def _damaged(checkpoint: Path, peers: Peers, unread: str | None) -> list[str]:
    try:
        manifest = dict(json.loads((checkpoint / _MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return [_MANIFEST]
    if manifest.pop(_MANIFEST, None) != _digest(manifest):
        return [_MANIFEST]
    names = sorted(name for name in manifest if Path(name).parts[0] != unread)
    return [
        name
        for name in _names_of_rank(names, peers)
        if not (checkpoint / name).is_file() or _checksum(checkpoint / name) != manifest[name]
    ]


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def write_metrics(checkpoint: Path, line: Mapping[str, Any]) -> None:
    """Write the line of ``metrics.jsonl`` of a checkpoint's step to its folder."""
    (checkpoint / _METRICS).write_text(json.dumps(line) + "\n")


def metric_of(checkpoint: Path, metric: str) -> float | None:
    """Return a number of the line that :func:`write_metrics` wrote, by its dotted path. None: there is none."""
    try:
        value: Any = json.loads((checkpoint / _METRICS).read_text())
        for key in metric.split("."):
            value = value[key]
        return None if value is None else float(value)
    except (OSError, ValueError, KeyError, TypeError):  # not measured there, or the file is damaged
        return None


def newest_checkpoint(path: str | Path) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest one of the run in it, or raise a UserError."""
    path = Path(path)
    if not (path / "config.json").is_file():
        if not (path / "checkpoints").is_dir():
            raise UserError(f"{path} is neither a saved omni model (config.json) nor a run folder with checkpoints")
        path = CheckpointStore(path / "checkpoints").newest()
    return path


def _put_aside(checkpoint: Path) -> Path:
    """Rename it first, so that an interrupted removal leaves no incomplete checkpoint."""
    return _renamed(checkpoint, checkpoint.with_name(f".{checkpoint.name}.leaving.partial"))


def _renamed(checkpoint: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)  # an earlier save of this step may have left files there
    return checkpoint.rename(target)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)  # `checkpoints/` only: never make the folder of a deleted run again
    folder.mkdir()


def _names_of_rank(names: Sequence[str], peers: Peers) -> Sequence[str]:
    return names[peers.rank :: peers.size]


def _synced_checksums(names: Sequence[str], folder: Path, previous: Path | None) -> dict[str, str]:
    """Flush the files to disk, and return file -> checksum. That of a file of ``previous`` is in its manifest."""
    set_default_modes(folder / name for name in names)
    known = _known_checksums(previous) if previous is not None else {}
    checksums = {}
    for name in names:
        if previous is not None and name in known and (folder / name).samefile(previous / name):
            checksums[name] = known[name]
            continue
        _sync(folder / name)
        checksums[name] = _checksum(folder / name)
    return checksums


def _known_checksums(checkpoint: Path) -> dict[str, str]:
    """Return file -> checksum of the files of a checkpoint that are there."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except OSError:  # a user has removed it
        return {}
    return {name: checksum for name, checksum in manifest.items() if (checkpoint / name).is_file()}


def _digest(manifest: Mapping[str, str]) -> str:
    """Return the manifest's own checksum, an entry of it."""
    return hashlib.sha256(json.dumps(sorted(manifest.items())).encode()).hexdigest()


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
