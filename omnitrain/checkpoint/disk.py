"""Free space of a disk, and permissions of files."""

from __future__ import annotations

import contextlib
import shutil
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
    """Give files the permissions that a plain ``open`` would have given them.

    safetensors writes to a temporary file that only its owner may read, and renames it. The default permissions come
    from the files' folder, because reading the umask would change it for other threads.
    """
    for file in files:
        default = file.parent.stat().st_mode & 0o666
        if default & ~file.stat().st_mode:
            with contextlib.suppress(OSError):  # a file system without permissions
                file.chmod(default)
