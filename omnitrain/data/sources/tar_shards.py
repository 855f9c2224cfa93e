"""Read tar shards as WebDataset writes them: files of the same name up to the first dot are one row, in any order."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from omnitrain.data.sources.files import FileReader, ReadError, is_url
from omnitrain.data.sources.index_file import index_of
from omnitrain.data.sources.table import EXAMPLES, URL_READS, Choose, Table, evenly_spaced
from omnitrain.errors import DataError

_TEXTS = ("txt", "text", "cls", "caption", "transcript")
_MEMBER = pa.struct({"suffix": pa.string(), "start": pa.int64(), "stop": pa.int64()})
_SCHEMA = pa.schema({"key": pa.string(), "members": pa.list_(_MEMBER)})
_INDEX = "tar 2"  # kind of index; the first one took neighbours alone for one row
_MOST_BETWEEN = 1 << 16  # bytes between the files of a row that are read with them


class _Member(NamedTuple):
    suffix: str
    start: int
    stop: int


class TarShards(Table):
    """Reads any row of uncompressed tar files.

    A column is named as the suffix of its file: ``jpg`` of ``0001.jpg``. Text files are strings. The fields of a
    ``json`` file are columns of the row themselves. All other files are ``{bytes, path}``.
    """

    def __init__(self, files: Sequence[str], choose: Choose, *, reader: FileReader) -> None:
        """Read or build the index of each shard; DataError: no tar file, or a compressed one."""
        self._files, self._reader = list(files), reader
        self._indexes = [index_of(file, _INDEX, reader.version(file), partial(_index, file, reader)) for file in files]
        self._ends = list(accumulate(map(len, self._indexes)))
        self._examples: list[tuple[int, dict[str, Any]]] = []
        for position in evenly_spaced(len(self), URL_READS if is_url(self._files[0]) else EXAMPLES):
            with contextlib.suppress(ReadError):
                self._examples.append((position, self.outline(position)))
        self.column_names = list(dict.fromkeys(name for _, record in self._examples for name in record))
        self.schema = choose(self.column_names)

    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """See :class:`Table`."""
        yield from (found for found in self._examples if found[0] < length)

    def outline(self, position: int) -> dict[str, Any]:
        """Return a row with texts and JSON, and whether each other file has bytes in the place of them."""
        shard, key, members = self._members(position)
        record: dict[str, Any] = {"id": _id(self._files[shard], key)}
        for suffix, start, stop in members:
            name = f"{key}.{suffix}"
            if suffix == "json" or suffix in _TEXTS:
                record |= self._column(shard, name, suffix, self._read(shard, key, start, stop))
            else:
                record[suffix] = {"bytes": stop > start, "path": name}
        return record

    def __getitem__(self, position: int) -> dict[str, Any]:
        shard, key, members = self._members(position)
        record: dict[str, Any] = {"id": _id(self._files[shard], key)}
        for near in _neighbours(members):
            first = near[0].start
            content = self._read(shard, key, first, near[-1].stop)
            for suffix, start, stop in near:
                record |= self._column(shard, f"{key}.{suffix}", suffix, content[start - first : stop - first])
        return record

    def _members(self, position: int) -> tuple[int, str, list[_Member]]:
        shard, within = self._place(position)
        found = self._indexes[shard].slice(within, 1).to_pylist()[0]
        return shard, found["key"], [_Member(**member) for member in found["members"]]

    def _read(self, shard: int, key: str, start: int, stop: int) -> bytes:
        try:
            return self._reader.read(self._files[shard], start, stop)
        except OSError as error:
            raise ReadError(f"{self._files[shard]}, {key!r}: {error}") from error

    def _column(self, shard: int, name: str, suffix: str, data: bytes) -> dict[str, Any]:
        where = f"{self._files[shard]}, {name!r}"
        try:
            if suffix == "json":
                fields = json.loads(data)
                if not isinstance(fields, dict):
                    raise ReadError(f"{where}: found {type(fields).__name__}, expected an object with columns")
                return fields
            if suffix in _TEXTS:
                return {suffix: data.decode()}
        except ReadError:
            raise
        except (ValueError, RecursionError) as error:
            raise ReadError(f"{where}: {error}") from error
        return {suffix: {"bytes": data, "path": name}}


def _id(file: str, key: str) -> str:
    return f"{PurePosixPath(file).stem}/{key}"


def _neighbours(members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Yield the files of a row, in the order of the shard, in parts that are each read at once."""
    near: list[_Member] = []
    for member in members:
        if near and member.start - near[-1].stop > _MOST_BETWEEN:
            yield near
            near = []
        near.append(member)
    yield near


def _index(file: str, reader: FileReader) -> pa.Table:
    """Return key and files of each row: a file joins its key's last row, unless that is apart and has its suffix."""
    keys: list[str] = []
    members: list[list[dict[str, Any]]] = []
    last: dict[str, int] = {}  # key -> its last row
    previous = -1  # row of the file before
    try:
        with reader.open(file) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")
                if not member.isfile() or not dot or not stem:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                found = {"suffix": suffix.lower(), "start": member.offset_data}
                row = last.get(key, -1)
                if row < 0 or (row != previous and any(one["suffix"] == found["suffix"] for one in members[row])):
                    row = last[key] = len(keys)
                    keys.append(key)
                    members.append([])
                members[row].append(found | {"stop": member.offset_data + member.size})
                previous = row
    except tarfile.TarError as error:
        raise DataError(
            f"data: {file}: not an uncompressed tar file ({error}); rows of a compressed one cannot be read one by "
            "one: decompress it (gunzip)"
        ) from None
    return pa.table({"key": keys, "members": members}, schema=_SCHEMA)
