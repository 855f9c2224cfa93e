"""Find where the rows of JSON Lines and JSON files are."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pyarrow as pa

from omnitrain.data.sources.files import FileReader, is_url
from omnitrain.data.sources.index_file import index_of
from omnitrain.errors import DataError

_PART = 1 << 24  # bytes that one thread scans
_BLOCK = 1 << 18  # bytes at a time, few enough for a cache of the processor
_NEWLINE = ord("\n")
_SHORT = 64  # bytes; only shorter lines may be blank

_BLANK = re.compile(r"[\s,]*")


def row_spans(file: str, reader: FileReader) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[rows]`` int64 first byte and end of each row of a file, memory-mapped.

    Rows are the lines of the file, without blank ones; of a ``.json`` file, the entries of its list.

    Args:
        file: path or URL.
        reader: reads it.

    Raises:
        DataError: a ``.json`` file is not a list of objects.
    """
    kind, build = ("json", _spans_of_entries) if file.endswith(".json") else ("lines", _spans_of_lines)
    index = index_of(file, kind, reader.version(file), lambda: pa.table(build(file, reader)))
    starts, stops = (index.column(name).combine_chunks().to_numpy() for name in ("start", "stop"))
    return starts, stops


def _spans_of_lines(file: str, reader: FileReader) -> dict[str, np.ndarray]:
    size = reader.version(file).size
    parts = [(start, min(start + _PART, size)) for start in range(0, size, _PART)]
    with ThreadPoolExecutor(1 if is_url(file) else min(4, os.cpu_count() or 1)) as threads:
        newlines = list(threads.map(lambda part: _newlines(file, reader, *part), parts))
    stops = np.concatenate([np.zeros(0, dtype=np.int64), *newlines]) + 1
    if size and (not len(stops) or stops[-1] < size):  # the last line has no newline
        stops = np.append(stops, size)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops])[:-1]
    kept = np.ones(len(stops), dtype=bool)
    step, first, content = _PART if is_url(file) else _BLOCK, 0, b""
    for row in np.flatnonzero(stops - starts <= _SHORT).tolist():
        start, stop = int(starts[row]), int(stops[row])
        if stop > first + len(content):  # many short lines are read at once
            first, content = start, reader.read(file, start, min(start + step, size))
        kept[row] = bool(content[start - first : stop - first].strip())
    return {"start": starts[kept], "stop": stops[kept]}


def _newlines(file: str, reader: FileReader, start: int, stop: int) -> np.ndarray:
    """Return ``[n]`` int64: positions of the newlines between two bytes of a file."""
    if is_url(file):
        return np.flatnonzero(np.frombuffer(reader.read(file, start, stop), np.uint8) == _NEWLINE) + start
    found, block = [], bytearray(_BLOCK)
    characters = np.frombuffer(block, np.uint8)
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while start < stop and (count := stream.readinto(block)):
            count = min(count, stop - start)
            found.append(np.flatnonzero(characters[:count] == _NEWLINE) + start)
            start += count
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


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
