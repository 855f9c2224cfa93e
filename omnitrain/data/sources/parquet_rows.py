"""Read parquet files where they lie, one row group at a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from omnitrain.data.sources.arrow_table import (
    column_problems,
    example_of,
    first_of_each_kind,
    record_of,
    undecoded_features,
)
from omnitrain.data.sources.files import FileReader, ReadError, is_url
from omnitrain.data.sources.table import EXAMPLES, URL_READS, Choose, Table, evenly_spaced
from omnitrain.errors import DataError

_KEPT_GROUPS = 5  # row groups in memory: those that an order in blocks uses at a time, and the next
_KEPT_BYTES = 1 << 28  # more are kept if they are small
_SEARCHED_BYTES = 1 << 28  # of messages, in which kinds are searched
_PATIENCE = 10  # times `read_seconds` in which a row group that could not be read is not tried again
_MOST_SOURCES = 1_000_000  # rows whose source column is read at once


class _Group(NamedTuple):
    file: int
    number: int  # in the file
    rows: int


class _Failure(NamedTuple):
    reason: str
    until: float  # on the monotonic clock; then the row group is read again


class ParquetRows(Table):
    """Reads rows from row groups, and keeps some of them in memory."""

    def __init__(self, files: Sequence[str], choose: Choose, *, reader: FileReader) -> None:
        """Read footers; DataError: other columns, or of ``choose``; OSError, pa.ArrowInvalid: no parquet."""
        self._files, self._reader = list(files), reader
        self._footers: list[pq.FileMetaData] = []
        self._groups: list[_Group] = []
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()
        self._failed: dict[int, _Failure] = {}
        schema: pa.Schema | None = None
        for file, path in enumerate(self._files):
            parquet = self._opened(file)
            if schema is None:
                schema = parquet.schema_arrow
            elif parquet.schema_arrow.names != schema.names:
                raise DataError(
                    f"data: {path!r} has columns {parquet.schema_arrow.names}, but {self._files[0]!r} has "
                    f"{schema.names}; list them as two data sets"
                )
            self._footers.append(parquet.metadata)
            sizes = (parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))
            self._groups += [_Group(file, number, rows) for number, rows in enumerate(sizes) if rows]
        assert schema is not None
        self.schema = choose(schema.names)
        self._columns = columns = self.schema.columns
        self._features = undecoded_features(datasets.Features.from_arrow_schema(schema), columns)
        self.column_names: list[str] = schema.names
        self.blocks = tuple(group.rows for group in self._groups)
        self._ends = list(accumulate(self.blocks))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_failed": {}}

    def __getitem__(self, position: int) -> dict[str, Any]:
        group, within = self._place(position)
        return record_of(self._group(group).slice(within, 1).to_pylist()[0], self._columns)

    def _group(self, group: int) -> pa.Table:
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        if group in self._failed and time.monotonic() < self._failed[group].until:
            raise ReadError(self._failed[group].reason)
        found = self._groups[group]
        try:
            table = self._read(group)
        except (OSError, pa.ArrowException, ReadError) as error:
            reason = f"{self._files[found.file]}, row group {found.number}: {error}"
            self._failed[group] = _Failure(reason, time.monotonic() + _PATIENCE * self._reader.seconds)
            raise ReadError(reason) from error
        self._kept[group] = table
        while len(self._kept) > _KEPT_GROUPS and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return table

    def _read(self, group: int, columns: list[str] | None = None) -> pa.Table:
        found = self._groups[group]
        return self._opened(found.file).read_row_group(found.number, columns=columns)

    def _readable(self, group: int, columns: list[str]) -> pa.Table | None:
        """Return columns of a row group; None if it is damaged, so that training skips its rows."""
        try:
            return self._read(group, columns)
        except (OSError, pa.ArrowException):
            return None

    def _opened(self, file: int) -> pq.ParquetFile:
        footer = self._footers[file] if file < len(self._footers) else None
        path = self._files[file]
        if is_url(path):
            return pq.ParquetFile(self._reader.open(path), metadata=footer)
        return pq.ParquetFile(path, metadata=footer, memory_map=True)

    def sources(self) -> list[Any] | None:
        """See :class:`Table`; None, too, if there are too many rows."""
        if len(self) > _MOST_SOURCES:
            return None
        name = self._columns.source
        values: list[Any] = []
        for group, rows in enumerate(self.blocks):
            table = self._readable(group, [name])
            values += [None] * rows if table is None else table[name].to_pylist()
        return values

    @cached_property
    def kinds(self) -> dict[tuple[Any, Any], int]:  # type: ignore[override]  # found at its first use
        """See :class:`Table`. Of large data sets, the kinds of some row groups."""
        if self._columns.messages not in self.column_names:
            return {}
        columns = self._columns
        names = [one for one in (columns.messages, columns.tools, columns.system) if one in self.column_names]
        firsts: dict[tuple[Any, Any], int] = {}
        for group in self._searched(names):
            if (table := self._readable(group, names)) is None:
                continue
            start = self._ends[group] - self.blocks[group]
            for kind, position in first_of_each_kind(table.combine_chunks(), self.schema).items():
                firsts.setdefault(kind, start + position)
        return firsts

    def _searched(self, leaves: Collection[str]) -> list[int]:
        """Return all row groups, or some that are evenly spaced, if columns (or parts of them) are too large."""
        total = 0
        for file, number, _ in self._groups:
            group = self._footers[file].row_group(number)
            columns = (group.column(column) for column in range(group.num_columns))
            total += sum(
                one.total_uncompressed_size
                for one in columns
                if not {one.path_in_schema, one.path_in_schema.split(".")[0]}.isdisjoint(leaves)
            )
        return evenly_spaced(
            len(self._groups), max(1, int(len(self._groups) * min(1.0, _SEARCHED_BYTES / max(total, 1))))
        )

    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """See :class:`Table`. Reads only the columns that the recipe names."""
        media, named = self._columns.of_media().values(), set(self._columns.names())
        leaves = [leaf.path for leaf in self._footers[0].schema if leaf.path.split(".")[0] in named]
        unread = {f"{leaf.removesuffix('.path')}.bytes" for leaf in leaves if leaf.split(".")[0] in media}
        leaves = [leaf for leaf in leaves if leaf not in unread]  # objects with a path and bytes: only the path is read
        groups = self._searched(leaves)
        groups = [groups[chosen] for chosen in evenly_spaced(len(groups), URL_READS)]
        for group in groups:
            start = self._ends[group] - self.blocks[group]
            if start >= length:
                return
            if (table := self._readable(group, leaves)) is None:
                continue
            for row in evenly_spaced(min(self.blocks[group], length - start), -(-EXAMPLES // len(groups))):
                yield start + row, _with_bytes(example_of(table, row, self._columns), media)

    def problems(self) -> list[str]:
        """See :class:`Table`."""
        return column_problems(self._features, self._columns)


def _with_bytes(record: dict[str, Any], media: Collection[str]) -> dict[str, Any]:
    """Return a record whose media have bytes, if they are objects whose ``bytes`` were not read."""

    def filled(file: Any) -> Any:
        return {"bytes": True} | file if isinstance(file, dict) else file

    for name in record.keys() & set(media):
        value = record[name]
        record[name] = [filled(file) for file in value] if isinstance(value, list) else filled(value)
    return record
