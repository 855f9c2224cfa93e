"""Free space of a disk, and permissions of files."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

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
