"""Read plain text files as documents. Long files are rows of some ten thousand bytes, cut between lines or words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from omnitrain.data.sources.files import FileReader, ReadError
from omnitrain.data.sources.table import Choose, Table

_ROW_BYTES = 1 << 15
_SEARCHED = 1 << 12  # bytes in which the end of a line or word is searched


@dataclass(frozen=True)
class Document:
    """A text to train on, whole or a part of a longer one."""

    text: str
    begins: bool = True  # the document begins here
    ends: bool = True


class TextFiles(Table):
    """Each file is a document, and a row is a part of one: ``{"text": Document}``. Empty files have no rows."""

    column_names = ("text",)

    def __init__(self, files: Sequence[str], choose: Choose, *, reader: FileReader) -> None:
        self._files, self._reader, self.schema = list(files), reader, choose(self.column_names)
        self._sizes = [reader.version(file).size for file in files]
        self._counts = [max(-(-(size - _SEARCHED) // _ROW_BYTES), min(size, 1)) for size in self._sizes]
        self._ends = list(accumulate(self._counts))
        self.kinds = {("document", None): 0}

    def __getitem__(self, position: int) -> dict[str, Any]:
        file, part = self._place(position)
        size, count = self._sizes[file], self._counts[file]
        begin, end = part * _ROW_BYTES, size if part == count - 1 else (part + 1) * _ROW_BYTES
        try:
            content = self._reader.read(self._files[file], begin, min(end + _SEARCHED, size))
            text = content[self._cut(begin, content) : end - begin + self._cut(end, content[end - begin :])].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ReadError(f"{self._files[file]}: {error}") from error
        return {"text": Document(text, begins=part == 0, ends=part == count - 1)}

    def _cut(self, at: int, following: bytes) -> int:
        """Return how many bytes after ``at`` a document is cut: after a line, a word, or at least a character."""
        if not at or not following:
            return 0
        searched = following[:_SEARCHED]
        for border in (b"\n", b" "):
            if (found := searched.find(border)) >= 0:
                return found + 1
        return next((place for place, byte in enumerate(searched) if byte & 0xC0 != 0x80), len(searched))

    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield nothing: all rows are documents."""
        yield from ()
