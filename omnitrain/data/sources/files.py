"""Read files and parts of files, on this machine or from a URL. A URL is tried again until a deadline."""

from __future__ import annotations

import glob
import http.client
import io
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import fsspec

from omnitrain.errors import DataError

_CHUNK = 1 << 16
_FIRST_PAUSE = 0.05  # seconds before the second try; each later pause is twice as long
_LONGEST_PAUSE = 5.0
_BUFFER = 1 << 20  # of a file that is read from a URL from its begin to its end
_MAY_PASS = {408, 425, 429, 500, 502, 503, 504}  # statuses of http after which another try may succeed
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

Result = TypeVar("Result")


class ReadError(ValueError):
    """A file could not be read. It costs the row that needs it, not the run."""


@dataclass(frozen=True)
class FileVersion:
    """The size of a file in bytes, and a text that changes with its content."""

    size: int
    tag: str


@dataclass(frozen=True)
class FileReader:
    """Reads files by path or URL, in any process: http and https by itself, other URLs (s3, gs, ...) with fsspec."""

    seconds: float = 60.0  # for one call with a URL, all tries together

    def version(self, file: str) -> FileVersion:
        """Return size and version of a file; FileNotFoundError: none there; ReadError: not read in time."""
        if not is_url(file):
            found = os.stat(file)
            return FileVersion(found.st_size, str(found.st_mtime_ns))
        if _is_http(file):
            return self._retried(file, lambda seconds: _http_version(file, seconds))
        system, path = fsspec.core.url_to_fs(file)
        info: dict[str, Any] = self._retried(file, lambda _: system.info(path))
        tags = (info.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
        return FileVersion(int(info["size"]), str(next(filter(None, tags), "")))

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes from ``start`` to ``stop``; FileNotFoundError: none there; else OSError, ReadError."""
        if not is_url(file):
            with open(file, "rb") as stream:
                stream.seek(start)
                return stream.read() if stop is None else stream.read(stop - start)
        if stop is not None and stop <= start:  # servers have no empty ranges
            return b""
        if _is_http(file):
            return self._retried(file, lambda seconds: _http_bytes(file, start, stop, seconds))
        system, path = fsspec.core.url_to_fs(file)
        return self._retried(file, lambda _: bytes(system.cat_file(path, start=start, end=stop)))

    def open(self, file: str, buffer_bytes: int = _BUFFER) -> BinaryIO:
        """Return a file object that can seek. Each read of a URL, of ``buffer_bytes``, has its deadline."""
        if not is_url(file):
            return open(file, "rb")
        return io.BufferedReader(_RangeFile(self, file, self.version(file).size), buffer_bytes)

    def _retried(self, file: str, attempt: Callable[[float], Result]) -> Result:
        deadline, pause, tries = time.monotonic() + self.seconds, _FIRST_PAUSE, 0
        while True:
            tries += 1
            try:
                seconds = deadline - time.monotonic()
                return _within(seconds, partial(attempt, seconds))
            except (FileNotFoundError, ImportError):
                raise
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code not in _MAY_PASS:
                    raise ReadError(f"{file}: {error}") from error
                if time.monotonic() + pause >= deadline:
                    why = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise ReadError(
                        f"{file}: not read within {self.seconds:g} s (read_seconds); tries: {tries}, the last: {why}"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def is_url(path: str) -> bool:
    """Return whether ``path`` is a URL, such as ``s3://bucket/rows.jsonl``, and not a path on this machine."""
    return "://" in path


def find_files(given: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files of a path or URL: a file, a folder (all files with a suffix), a glob, or a range ``{00..12}``.

    Raises DataError: the package that reads such URLs is missing, or the storage cannot be read.
    """
    if found := _RANGE.search(given):
        first, last = found.groups()
        numbers = range(int(first), int(last) + 1)
        return [given[: found.start()] + f"{i:0{len(first)}}" + given[found.end() :] for i in numbers]
    if _is_http(given):
        return [given]
    if is_url(given):
        try:
            return _files_of_storage(given, suffixes)
        except FileNotFoundError:
            return []
        except (OSError, ImportError, ValueError) as error:
            raise DataError(f"data: {given!r} cannot be listed: {error}") from error
    path = Path(given)
    if path.is_file():
        return [given]
    if path.is_dir():
        return sorted(str(file) for file in path.glob("**/*") if file.name.endswith(suffixes) and file.is_file())
    matching = glob.glob(given, recursive=True, include_hidden=True) if glob.has_magic(given) else []
    return sorted(file for file in matching if os.path.isfile(file))


def _files_of_storage(given: str, suffixes: tuple[str, ...]) -> list[str]:
    system, path = fsspec.core.url_to_fs(given)
    if glob.has_magic(given):
        found = system.glob(path)
    elif system.isfile(path):
        return [given]
    else:
        found = [file for file in system.find(path) if file.endswith(suffixes)]
    return sorted(system.unstrip_protocol(file) for file in found)


def _is_http(file: str) -> bool:
    return file.startswith(("http://", "https://"))


def _http_version(url: str, seconds: float) -> FileVersion:
    with _request(url, seconds, method="HEAD") as response:
        length = response.headers.get("Content-Length")
        if length is None:
            raise OSError("the server does not tell the size of the file")
        return FileVersion(int(length), response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


def _http_bytes(url: str, start: int, stop: int | None, seconds: float) -> bytes:
    """Read a part of a URL, and give up after ``seconds``, however slowly the server sends."""
    deadline = time.monotonic() + seconds
    is_part = bool(start) or stop is not None
    headers = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if is_part else {}
    parts: list[bytes] = []
    with _request(url, seconds, headers=headers) as response:
        if is_part and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            raise ReadError(f"{url}: the server does not send parts of files (Range); copy the file to this machine")
        expected = int(response.headers.get("Content-Length") or -1)
        while part := response.read1(_CHUNK):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{sum(map(len, parts))} of {expected} bytes arrived")
    content = b"".join(parts)
    if expected >= 0 and len(content) != expected:
        raise http.client.IncompleteRead(content, expected - len(content))
    return content


def _request(url: str, seconds: float, **options: Any) -> http.client.HTTPResponse:
    """Open a URL. A single wait for the server takes ``seconds`` at most."""
    try:
        request = urllib.request.Request(url, **options)
        return urllib.request.urlopen(request, timeout=max(seconds, 0.01))
    except urllib.error.HTTPError as error:
        if error.code in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.GONE):
            raise FileNotFoundError(f"{url}: {error}") from None
        raise


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of ``call``, which a thread runs: clients have no timeout, or one for each wait."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except Exception as error:  # raised in the calling thread
            outcome["error"] = error

    thread = threading.Thread(target=run, name="read", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if "error" in outcome:
        raise outcome["error"]
    if "result" not in outcome:
        raise TimeoutError("no answer")
    return outcome["result"]


class _RangeFile(io.RawIOBase):
    """A file object that reads parts of a URL."""

    def __init__(self, reader: FileReader, file: str, size: int) -> None:
        self._reader, self._file, self._size, self._at = reader, file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._reader.read(self._file, self._at, min(self._at + len(buffer), self._size))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
