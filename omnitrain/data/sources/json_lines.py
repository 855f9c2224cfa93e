"""Read JSON Lines and JSON files as a table: each line (or entry of the list) is a row, an object of columns."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from omnitrain.data.sources.files import FileReader, ReadError, is_url
from omnitrain.data.sources.index_file import index_of
from omnitrain.data.sources.schema import Schema
from omnitrain.data.sources.table import EXAMPLES, URL_READS, Choose, Table, evenly_spaced
from omnitrain.data.sources.turns import FIELDS, MARKERS, PART, SAID, TURN
from omnitrain.errors import DataError
from omnitrain.recipe import Columns

CHECKED_BYTES = 1 << 25  # data sets up to this size are checked whole when they are opened
_CHECKED_ROWS = 2000  # rows of larger ones, evenly spaced
_READ_BYTES = 1 << 18  # of rows that one read gets from a URL
_COUNTED_BYTES = 1 << 24  # at a time, for the number of a line
_MAX_SHOWN = 3  # lines that an error lists
_BLANK = re.compile(r"[\s,]*")
_PART = 1 << 24  # bytes of a URL that are read at once for the index of its lines


class JsonLines(Table):
    """Reads rows from their files on demand. Blank lines are skipped, and rows may have different columns.

    Values keep their JSON types, so digits in quotes stay text. Some rows show the ``kinds`` of large data sets.
    """

    def __init__(self, files: Sequence[str], choose: Choose, *, reader: FileReader) -> None:
        """Find and check the rows; DataError: wrong lines, by file and number, or what ``choose`` raises."""
        self._reader = reader
        self._files = [file if is_url(file) else str(Path(file).absolute()) for file in files]
        self._spans = [row_spans(file, self._reader) for file in self._files]
        self._ends = list(accumulate(len(starts) for starts, _ in self._spans))
        self._is_checked = sum(int(stops[-1]) for _, stops in self._spans if len(stops)) <= CHECKED_BYTES
        self._check_rows(choose)
        if (schema := choose(self.column_names)) != self.schema:  # a later row has a further column
            self._check_rows(lambda _: schema)

    def _check_rows(self, choose: Choose) -> None:
        rows = self._looked_at()
        first = list(islice(rows, EXAMPLES))
        self.schema = choose(list(dict.fromkeys(name for *_, line in first for name in _names(line))))
        self._columns = self.schema.columns
        self._sources: list[Any] | None = [] if self._is_checked else None
        self.kinds: dict[tuple[Any, Any], int] = {}
        names: dict[str, None] = {}
        wrong: list[str] = []
        num_wrong = 0
        for position, line in chain(first, rows):
            try:
                record = _record(line, self._columns)
            except ValueError as error:
                num_wrong += 1
                if num_wrong <= _MAX_SHOWN:
                    wrong.append(f"{self._where(position)}: {error}")
                continue
            names |= dict.fromkeys(record)
            for kind in kinds_of(record, self.schema):
                self.kinds.setdefault(kind, position)
            if self._sources is not None:
                source = record.get(self._columns.source)
                self._sources.append(sys.intern(source) if isinstance(source, str) else source)
        self.column_names = list(names)
        if wrong and (self._is_checked or not names):  # a few bad lines of a large data set are skipped in training
            more = [f"... and {num_wrong - _MAX_SHOWN} more lines"] if num_wrong > _MAX_SHOWN else []
            raise DataError("\n".join(f"data: {line}" for line in [*wrong, *more]))

    def _looked_at(self) -> Iterator[tuple[int, bytes]]:
        """Yield position and content of all rows, or of some if there are many."""
        if not self._is_checked:
            yield from self._some(len(self), _CHECKED_ROWS)
            return
        position = 0
        for file, (starts, stops) in zip(self._files, self._spans, strict=True):
            content = self._reader.read(file)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                yield position, content[start:stop]
                position += 1

    def _some(self, length: int, most: int) -> Iterator[tuple[int, bytes]]:
        """Yield position and content of about ``most`` of the first ``length`` rows, evenly spaced."""
        reads = min(most, URL_READS) if is_url(self._files[0]) else most
        for first, following in pairwise([*evenly_spaced(length, reads), length]):
            file, begin = self._place(first)
            starts, stops = self._spans[file]
            last = int(np.searchsorted(stops, starts[begin] + _READ_BYTES, side="right"))
            end = max(begin + 1, min(last, begin + most // reads, begin + following - first))
            content = self._reader.read(self._files[file], int(starts[begin]), int(stops[end - 1]))
            for row in range(begin, end):
                yield first + row - begin, content[starts[row] - starts[begin] : stops[row] - starts[begin]]

    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """See :class:`Table`."""
        for position, line in self._some(length, EXAMPLES):
            with contextlib.suppress(ValueError):
                yield position, _record(line, self._columns)

    def __getitem__(self, position: int) -> dict[str, Any]:
        file, start, stop = self._span(position)
        try:
            return _record(self._reader.read(file, start, stop), self._columns)
        except ReadError:
            raise
        except (OSError, ValueError) as error:
            if self._is_checked:
                raise DataError(f"data: {file} changed while it was in use: {error}") from None
            raise ReadError(f"{self._where(position)}: {error}") from None

    def _span(self, position: int) -> tuple[str, int, int]:
        file, within = self._place(position)
        starts, stops = self._spans[file]
        return self._files[file], int(starts[within]), int(stops[within])

    def _where(self, position: int) -> str:
        file, start, stop = self._span(position)
        if file.endswith(".json"):
            return f"{file}, entry {self._place(position)[1] + 1}"
        if is_url(file):
            return f"{file}, byte {start}"
        start = stop - len(self._reader.read(file, start, stop).lstrip())  # blank lines are before it
        lines = 1
        for begin in range(0, start, _COUNTED_BYTES):
            lines += self._reader.read(file, begin, min(start, begin + _COUNTED_BYTES)).count(b"\n")
        return f"{file}, line {lines}"

    def sources(self) -> list[Any] | None:
        """See :class:`Table`; None, too, if the data set is too large to know."""
        return self._sources


def kinds_of(record: dict[str, Any], schema: Schema) -> Iterator[tuple[Any, Any]]:
    """Yield the kinds of a row; see :class:`Table`."""
    columns, marked = schema.columns, schema.marked
    turns = record.get(columns.messages)
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            role, content = (next((turn[n] for n in FIELDS[f] if turn.get(n) is not None), None) for f in TURN)
            yield from ((str(role), kind) for kind in _kinds(turn, content, marked))
    yield from ((column, None) for column in ("tools", "system") if record.get(getattr(columns, column)))


def _names(line: bytes) -> list[str]:
    try:
        return list(_object(line))
    except ValueError:
        return []


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"invalid JSON: {where}; each line of the file must be one object") from None
    if not isinstance(record, dict):
        raise ValueError(f"found {_kind_of(record)}, expected an object with the columns of a row")
    return record


def _record(line: bytes, columns: Columns) -> dict[str, Any]:
    record = _object(line)
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


def _kinds(turn: dict[str, Any], content: Any, marked: Collection[str]) -> Iterator[str | None]:
    """Yield None, the other keys of a turn, the types of its parts (marked in a text, too), and their keys."""
    yield None
    yield from (f"message.{key}" for key, value in turn.items() if key not in SAID and value is not None)
    if isinstance(content, str):
        yield from (modality for modality in marked if MARKERS[modality] in content)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            yield str(part.get("type"))
            for key, value in part.items():
                inside = value if isinstance(value, dict) else {}
                found = {f"part.{key}": value} | {f"part.{key}.{name}": one for name, one in inside.items()}
                yield from (name for name, one in found.items() if key not in PART and one is not None)


def _kind_of(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(type(value), repr(value))


def row_spans(file: str, reader: FileReader) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[rows]`` int64 first byte and end of each row of a file (a path or URL), memory-mapped.

    Blank lines belong to the row after them. Raises DataError: a ``.json`` file is not a list of objects.
    """
    kind, build = ("json", _spans_of_entries) if file.endswith(".json") else ("lines", _borders_of_lines)
    index = index_of(file, kind, reader.version(file), lambda: pa.table(build(file, reader)))
    columns = [column.combine_chunks().to_numpy() for column in index.columns]
    starts, stops = columns if kind == "json" else (columns[0][:-1], columns[0][1:])
    return starts, stops


def _borders_of_lines(file: str, reader: FileReader) -> dict[str, np.ndarray]:
    """Return the first byte of the file and the end of each line that is not blank."""
    with reader.open(file, _PART) as stream:
        return {"border": np.fromiter(chain([0], _ends_of_lines(stream)), dtype=np.int64)}


def _ends_of_lines(lines: Iterable[bytes]) -> Iterator[int]:
    end = 0
    for line in lines:
        end += len(line)
        if not line.isspace():
            yield end


def _spans_of_entries(file: str, reader: FileReader) -> dict[str, np.ndarray]:
    # Each byte becomes a character, so that positions are bytes; the structure of JSON has only ASCII characters.
    text = reader.read(file).decode("latin-1")
    decoder = json.JSONDecoder()
    spans: list[tuple[int, int]] = []
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] != "[":
        raise DataError(
            f"data: {file}: found {text[start : start + 20]!r}, expected a list of rows; a file with one row per line "
            "ends in .jsonl"
        )
    at = start + 1
    while text[(at := _BLANK.match(text, at).end()) : at + 1] != "]":  # type: ignore[union-attr]
        if at == len(text):
            raise DataError(f"data: {file}: the list has no end; the file is cut")
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(f"data: {file}: entry {len(spans) + 1}: invalid JSON: {error}") from None
        spans.append((at, end))
        at = end
    flat = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=2 * len(spans))
    return {"start": flat[0::2], "stop": flat[1::2]}
