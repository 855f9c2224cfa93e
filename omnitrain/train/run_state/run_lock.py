"""Lock a folder, so that one run at a time writes to it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from omnitrain.errors import UserError

LOCK_FILE = ".lock"  # the file is never removed; only a process's lock on it counts


class FolderLock:
    """A lock that this process holds until it releases it or ends.

    On a shared disk it is valid for all machines. On a file system without locks, every folder is free.
    """

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
