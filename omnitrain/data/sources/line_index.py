"""Find where the rows of JSON Lines and JSON files are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pyarrow as pa

from omnitrain.data.sources.files import FileReader, is_url
from omnitrain.data.sources.index_file import index_of
from omnitrain.errors import DataError

_PART = 1 << 24  # bytes that one thread scans
_BLOCK = 1 << 20  # bytes at a time; a multiple of 8
_LINES = 1 << 15  # at a time, few enough for a cache of the processor
_NEWLINE = ord("\n")
_ONE, _PLACES, _HIGHEST = np.uint64(1), np.uint64(0x0001020304050607), np.uint64(56)
_SHORT = 64  # bytes; only shorter lines may be blank

_BLANK = re.compile(r"[\s,]*")


def row_spans(file: str, reader: FileReader) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[rows]`` int64 first byte and end of each row of a file, memory-mapped.

    Rows are the lines of the file, each with the blank lines before it; of a ``.json`` file, the entries of its list.

    Args:
        file: path or URL.
        reader: reads it.

    Raises:
        DataError: a ``.json`` file is not a list of objects.
    """
    kind, build = ("json", _spans_of_entries) if file.endswith(".json") else ("lines", _borders_of_lines)
    index = index_of(file, kind, reader.version(file), lambda: pa.table(build(file, reader)))
    columns = [column.combine_chunks().to_numpy() for column in index.columns]
    starts, stops = columns if kind == "json" else (columns[0][:-1], columns[0][1:])
    return starts, stops


def _borders_of_lines(file: str, reader: FileReader) -> dict[str, np.ndarray]:
    """Return the first byte of the file and the end of each line that is not blank."""
    size = reader.version(file).size
    parts = [(start, min(start + _PART, size)) for start in range(0, size, _PART)]
    with ThreadPoolExecutor(1 if is_url(file) else min(4, os.cpu_count() or 1)) as threads:
        blocks = chain.from_iterable(threads.map(lambda part: _ends_of_lines(file, reader, *part), parts))
        borders = np.concatenate([np.zeros(1, dtype=np.int64), *blocks])
    if borders[-1] < size:  # the last line has no newline
        borders = np.append(borders, size)
    is_kept = np.ones(len(borders), dtype=bool)
    step, first, content = _PART if is_url(file) else _BLOCK, 0, b""
    for row in _short_lines(borders):
        start, stop = int(borders[row]), int(borders[row + 1])
        if stop > first + len(content):  # many short lines are read at once
            first, content = start, reader.read(file, start, min(start + step, size))
        is_kept[row + 1] = bool(content[start - first : stop - first].strip())
    return {"border": borders if is_kept.all() else borders[is_kept]}


def _short_lines(borders: np.ndarray) -> Iterator[int]:
    """Yield the lines that may be blank. Few at a time are looked at: new memory for all costs more than the look."""
    for first in range(0, len(borders) - 1, _LINES):
        lengths = np.diff(borders[first : first + _LINES + 1])
        yield from (np.flatnonzero(lengths <= _SHORT) + first).tolist()


def _ends_of_lines(file: str, reader: FileReader, start: int, stop: int) -> list[np.ndarray]:
    """Return the ends of the lines that end between two bytes of a file, in order, in arrays of any length."""
    if is_url(file):
        return [np.flatnonzero(np.frombuffer(reader.read(file, start, stop), np.uint8) == _NEWLINE) + (start + 1)]
    found, block = [], bytearray(_BLOCK)
    characters, is_newline = np.frombuffer(block, np.uint8), np.empty(_BLOCK, dtype=bool)
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while start < stop and (count := min(stream.readinto(block), stop - start)):
            np.equal(characters, _NEWLINE, out=is_newline)
            is_newline[count:] = False
            found.append(_true_places(is_newline) + (start + 1))
            start += count
    return found


def _true_places(flags: np.ndarray) -> np.ndarray:
    """Return ``[n]`` int64: where ``flags`` are true, like ``np.flatnonzero``, but faster where few are.

    Eight flags at a time are looked at as one number. A true flag with seven false ones is a power of 256, and the
    product with ``_PLACES`` has its place in the highest byte.

    Args:
        flags: ``[n]`` bool, n a multiple of 8.
    """
    eights = flags.view("<u8")
    places = np.flatnonzero(eights != 0)
    found = eights[places]
    if (found & (found - _ONE)).any():  # two true flags among eight
        return np.flatnonzero(flags)
    places <<= 3
    places += ((found * _PLACES) >> _HIGHEST).view(np.int64)
    return places


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
