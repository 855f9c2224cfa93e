"""Read JSON Lines files as a table: each line is a row, an object of column names and values."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from omnitrain.data.sources.turns import MORE_FIELDS, as_messages
from omnitrain.errors import DataError
from omnitrain.recipe import Columns

_MAX_SHOWN = 3  # lines that an error lists


class JsonLines:
    """Reads rows from their files on demand; see :class:`omnitrain.data.sources.rows.Table`.

    Values keep their JSON types, so digits in quotes stay text. Rows may have different columns.

    Attributes:
        kinds: see :class:`omnitrain.data.sources.rows.Table`.
    """

    def __init__(self, files: Sequence[str], columns: Columns, *, marked: Collection[str]) -> None:
        """Read all lines once, and keep the offset and source of each row and the kinds of its messages.

        Args:
            files: files in order; blank lines are skipped.
            columns: names of the columns of messages, media and sources.
            marked: see :func:`omnitrain.data.sources.turns.as_messages`.

        Raises:
            DataError: lines are not rows; the message gives their files and line numbers.
        """
        self._files, self._columns = [str(Path(file).absolute()) for file in files], columns
        self._starts: list[np.ndarray] = []
        self._sources: list[Any] = []
        self.kinds: dict[tuple[Any, Any], int] = {}
        names: dict[str, None] = {}
        wrong: list[str] = []
        num_wrong = 0
        for file in self._files:
            starts = []
            for number, start, line in _lines(file):
                try:
                    record = _record(line, columns)
                except ValueError as error:
                    num_wrong += 1
                    if num_wrong <= _MAX_SHOWN:
                        wrong.append(f"{file}, line {number}: {error}")
                    continue
                names |= dict.fromkeys(record)
                for kind in _kinds(as_messages(record.get(columns.messages), marked=marked)):
                    self.kinds.setdefault(kind, len(self._sources))
                if record.get(columns.tools):
                    self.kinds.setdefault(("tools", None), len(self._sources))
                source = record.get(columns.source)
                self._sources.append(sys.intern(source) if isinstance(source, str) else source)
                starts.append(start)
            self._starts.append(np.array(starts, dtype=np.int64))
        if wrong:
            more = [f"... and {num_wrong - _MAX_SHOWN} more lines"] if num_wrong > _MAX_SHOWN else []
            raise DataError("\n".join(f"data: {line}" for line in [*wrong, *more]))
        self._ends = list(accumulate(map(len, self._starts)))
        self.column_names = list(names)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return a row; columns that it lacks are None.

        Raises:
            DataError: the file was changed after it was opened.
        """
        file = bisect_right(self._ends, position)
        start = self._starts[file][position - self._ends[file]]
        try:
            with open(self._files[file], "rb") as stream:
                stream.seek(int(start))
                record = _record(stream.readline(), self._columns)
        except (OSError, ValueError) as error:
            raise DataError(f"data: {self._files[file]} changed while it was in use: {error}") from None
        return dict.fromkeys(self.column_names) | record

    def sources(self) -> list[Any]:
        """Return each row's value in the source column."""
        return self._sources

    def problems(self) -> list[str]:
        """Return no problems, because wrong types were refused when the files were opened."""
        return []


def _lines(file: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), byte offset and content of each line that is not blank."""
    start = 0
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, start, line
            start += len(line)


def _record(line: bytes, columns: Columns) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"invalid JSON: {where}; each line of the file must be one object") from None
    if not isinstance(record, dict):
        raise ValueError(f"found {_kind_of(record)}, expected an object with the columns of a row")
    messages = record.get(columns.messages, [])
    if not isinstance(messages, list):
        raise ValueError(
            f"`{columns.messages}` (columns.messages) is {_kind_of(messages)}, expected a list of messages"
        )
    for field, name in columns.of_media().items():
        value = record.get(name)
        for file in value if isinstance(value, list) else [value]:
            if not (file is None or isinstance(file, (str, dict))):
                raise ValueError(f"`{name}` (columns.{field}) has {_kind_of(file)}, expected paths of files")
    return record


def _kinds(messages: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the role of each message, and the role and type of each of its parts and calls."""
    for message in messages or ():
        if isinstance(message, dict):
            role, content = str(message.get("role")), message.get("content")
            yield role, None
            yield from ((role, name) for name in MORE_FIELDS if message.get(name))
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict):
                    yield role, str(part.get("type"))


def _kind_of(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(type(value), repr(value))
