"""Find where the rows of JSON Lines and JSON files are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from omnitrain.data.sources.files import FileReader
from omnitrain.data.sources.index_file import index_of
from omnitrain.errors import DataError

_BLANK = re.compile(r"[\s,]*")


def row_spans(file: str, reader: FileReader) -> tuple[np.ndarray, np.ndarray]:
    """Return ``[rows]`` int64 first byte and end of each row of a file (a path or URL), memory-mapped.

    Rows are the lines of the file, each with the blank lines before it; of a ``.json`` file, the entries of its list.

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
    with reader.open(file) as stream:
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
