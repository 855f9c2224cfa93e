"""Keep where the rows of a file are, as a memory map in the cache folder of the user.

An index is built once, by one process; others wait for it. It is used as long as the file's size and time stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from omnitrain.data.sources.files import FileVersion, is_url

_FORMAT = 2  # raise it if an index gets other columns


def index_of(file: str, kind: str, version: FileVersion, build: Callable[[], pa.Table]) -> pa.Table:
    """Return a file's index, memory-mapped; one process of this machine calls ``build`` if the cache has none."""
    name = file if is_url(file) else str(Path(file).resolve())
    digest = hashlib.sha256(f"{_FORMAT}\n{kind}\n{name}".encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnitrain" / "indexes"
    path, stamp = cache / f"{digest}.arrow", f"{version.size} {version.tag}".encode()
    if (found := _kept(path, stamp)) is not None:
        return found
    with _locked(path.with_suffix(".lock")) as is_locked:
        if is_locked and (found := _kept(path, stamp)) is not None:
            return found
        index = build().replace_schema_metadata({b"version": stamp})
        return index if not is_locked or not _keep(path, index) else _kept(path, stamp) or index


def _kept(path: Path, stamp: bytes) -> pa.Table | None:
    try:
        index = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowInvalid):
        return None
    return index if (index.schema.metadata or {}).get(b"version") == stamp else None


def _keep(path: Path, index: pa.Table) -> bool:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, index.schema) as writer:
            writer.write_table(index.combine_chunks())
        partial.replace(path)
    except OSError:  # no space: the next run builds it again
        with contextlib.suppress(OSError):
            partial.unlink()
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of an index. Yield False if the cache folder cannot be written, or its storage has no locks."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "w")), fcntl.LOCK_EX)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked
