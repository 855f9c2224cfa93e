"""Read a data set of HF ``datasets`` that can only be iterated, such as one of the Hub that is not downloaded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import pyarrow as pa

from omnitrain.data.sources.arrow_table import record_of
from omnitrain.data.sources.files import ReadError
from omnitrain.data.sources.table import EXAMPLES, Choose, Table
from omnitrain.errors import DataError
from omnitrain.recipe import Columns

ENDLESS = 1 << 52  # rows; a float has no larger integers without gaps
_ROWS_AT_A_TIME = 16
_MOST_WAITING = 1024  # rows that were passed
_MOST_BYTES = 1 << 28  # of them
_MOST_TRIES = 3  # of a place; each of them reads the stream again up to there


class _SizedRow(NamedTuple):
    row: dict[str, Any]
    size: int  # in bytes


@dataclass(eq=False)
class _Cursor:
    """Reads on from one position of the stream."""

    position: int  # of the next row, counted over all passes
    rows: Iterator[_SizedRow]
    has_read: bool = False


class Stream(Table):
    """The rows of a stream by their position, in pass after pass.

    Slots ask for rows in about the order of the stream, so skipped rows are kept for a while; for a row that is no
    longer kept, a second cursor reads up to it, and serves that slot from then on. The first rows have all its columns.
    """

    def __init__(self, data: datasets.IterableDataset, choose: Choose) -> None:
        self._data, self._columns = data.with_format("arrow"), Columns()
        self._length: int | None = None
        self._skipped = 0
        self._cursors: list[_Cursor] = []
        self._tries: Counter[int] = Counter()  # position -> how often it could not be read
        self._waiting: OrderedDict[int, _SizedRow] = OrderedDict()
        self._waiting_bytes = 0
        self._first: list[dict[str, Any]] = []
        for row, _ in self._rows_from(0):
            self._first.append(row)
            if len(self._first) == EXAMPLES:
                break
        else:
            self._length = len(self._first)
        self.column_names = list(dict.fromkeys(name for row in self._first for name in row))
        self.schema = choose(self.column_names)
        self._columns = self.schema.columns
        self._first = [record_of(row, self._columns) for row in self._first]

    def skip(self, rows: int) -> None:
        """Begin to read at a position: earlier rows will not be asked for."""
        self._skipped = rows

    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """See :class:`Table`."""
        yield from ((position, dict(row)) for position, row in enumerate(self._first[:length]))

    def __len__(self) -> int:
        """Return 0 if the stream is empty, else more rows than any run draws."""
        return ENDLESS if self._first else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cursors": [], "_waiting": OrderedDict(), "_waiting_bytes": 0}

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position < len(self._first):
            return dict(self._first[position])
        if position in self._waiting:
            return self._take_waiting(position)
        behind = [cursor for cursor in self._cursors if cursor.position <= position]
        cursor = max(behind, key=lambda one: one.position) if behind else self._begun_at(position)
        try:
            while cursor.position < position:
                passed = cursor.position
                self._waiting[passed] = self._read(cursor)
                self._waiting_bytes += self._waiting[passed].size
                while len(self._waiting) > _MOST_WAITING or self._waiting_bytes > _MOST_BYTES:
                    self._take_waiting(next(iter(self._waiting)))
            return self._read(cursor).row
        except (OSError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            self._cursors.remove(cursor)  # its iterator has ended
            reason = f"{type(error).__name__}: {error}"
            place = cursor.position
            self._tries[place] += 1
            if self._tries[place] >= _MOST_TRIES:
                tries = f"breaks at row {place} in each of {_MOST_TRIES} tries"
                raise DataError(f"data: the stream {tries}: {reason}; mend the data set, or set a `limit`") from error
            raise ReadError(f"row {position} of the stream: {reason}") from error

    def _take_waiting(self, position: int) -> dict[str, Any]:
        row, size = self._waiting.pop(position)
        self._waiting_bytes -= size
        return row

    def _begun_at(self, position: int) -> _Cursor:
        if not self._cursors and self._skipped <= position:
            position = self._skipped  # a slot may be behind the slot that asks first
        cursor = _Cursor(position, self._rows_from(position))
        self._cursors.append(cursor)
        return cursor

    def _read(self, cursor: _Cursor) -> _SizedRow:
        read = next(cursor.rows, None)
        if read is None:
            if self._length is None:
                # A cursor that begins after the end reads nothing: the run resumes in a later pass.
                self._length = cursor.position if cursor.has_read else sum(1 for _ in self._rows_from(0))
            cursor.rows = self._rows_from(cursor.position)
            read = next(cursor.rows)
        cursor.position, cursor.has_read = cursor.position + 1, True
        return read

    def _rows_from(self, position: int) -> Iterator[_SizedRow]:
        skipped = position if self._length is None else position % self._length
        # Not the iterator of `datasets`: it would divide the rows among the processes of a DataLoader.
        for table in self._data.skip(skipped).iter(batch_size=_ROWS_AT_A_TIME):
            yield from (
                _SizedRow(record_of(row, self._columns), table.nbytes // len(table)) for row in table.to_pylist()
            )
