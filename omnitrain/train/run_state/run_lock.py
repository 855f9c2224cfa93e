"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from omnitrain.errors import UserError

LOCK_FILE = ".lock"  # stays; what counts is who holds it


class FolderLock:
    """Held by this process until it is released, or the process ends, however that is.

    On a shared disk it holds for all machines. Where a file system has no locks, every folder is free.
    """

    def __init__(self) -> None:
        self._stream: TextIO | None = None

    def take(self, folder: Path) -> None:
        """Hold ``folder``, which is there, and no other.

        Raises:
            UserError: another process holds it.
        """
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
        """Let others have it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def require_free(folder: Path) -> None:
    """Nothing is written; ``folder`` need not be there.

    Raises:
        UserError: another process holds it.
    """
    if (folder / LOCK_FILE).is_file():
        with (folder / LOCK_FILE).open() as stream:
            _lock(stream, fcntl.LOCK_SH, folder)


def _lock(stream: TextIO, kind: int, folder: Path) -> None:
    try:
        fcntl.lockf(stream, kind | fcntl.LOCK_NB)  # of the process: what it forks has no part in it
    except (BlockingIOError, PermissionError):
        stream.seek(0)
        raise UserError(
            f"output_dir: a run ({stream.read()}) writes into {str(folder)!r}; wait for its end, or name another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
