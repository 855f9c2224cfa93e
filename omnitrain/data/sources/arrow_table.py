"""Read a data set of HF ``datasets`` or an Arrow table, whose media stay encoded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from omnitrain.data.sources.schema import Schema
from omnitrain.data.sources.table import EXAMPLES, Choose, Table, evenly_spaced
from omnitrain.data.sources.turns import FIELDS, MARKERS, PART, SAID
from omnitrain.recipe import Columns

_LISTS = (datasets.List, datasets.LargeList)


class ArrowTable(Table):
    """A data set of HF ``datasets``, whose media will not be decoded."""

    def __init__(self, data: datasets.Dataset, choose: Choose) -> None:
        self.schema = choose(data.column_names)
        self._columns = columns = self.schema.columns
        info = data.info.copy()
        info.features = undecoded_features(data.features, columns)
        # `cast` would copy the rows; and a fingerprint that it computes would read all of them.
        self._data = datasets.Dataset(data.data, info, indices_table=data._indices, fingerprint=data._fingerprint)
        self.column_names: list[str] = data.column_names

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return record_of(dict(self._data[position]), self._columns)

    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """See :class:`Table`."""
        for position in evenly_spaced(length, EXAMPLES):
            yield position, self.outline(position)

    def outline(self, position: int) -> dict[str, Any]:
        """See :class:`Table`."""
        found = example_of(self._data.data.slice(position, 1), 0, self._columns)
        return record_of(found, self._columns)

    def sources(self) -> list[Any]:
        """See :class:`Table`."""
        return list(self._data[self._columns.source])

    @cached_property
    def kinds(self) -> dict[tuple[Any, Any], int]:  # type: ignore[override]  # found at its first use
        """See :class:`Table`. Does not read texts or media."""
        return first_of_each_kind(self._data.data, self.schema)

    def problems(self) -> list[str]:
        """See :class:`Table`."""
        return column_problems(self._data.features, self._columns)


def example_of(table: pa.Table, position: int, columns: Columns) -> dict[str, Any]:
    """Return a row of an Arrow table. Bytes of media are not read: in their place is whether there are any."""
    media = columns.of_media().values()
    row = {name: table.column(name)[position] for name in table.column_names}
    return {name: _without_bytes(value) if name in media else value.as_py() for name, value in row.items()}


def _without_bytes(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    if isinstance(value, pa.StructScalar):
        return {name: _without_bytes(one) for name, one in value.items()}
    if isinstance(value, (pa.ListScalar, pa.LargeListScalar)):
        return [_without_bytes(one) for one in value.values]
    if pa.types.is_binary(value.type) or pa.types.is_large_binary(value.type):
        return value.as_buffer().size > 0
    return value.as_py()


def record_of(record: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return a record without the null fields in messages and tools that Arrow adds for fields of other rows."""
    nested = {columns.messages, columns.tools, columns.response, *columns.prompts}
    return record | {name: _without_nulls(record[name]) for name in record.keys() & nested}


def first_of_each_kind(table: Any, schema: Schema) -> dict[tuple[Any, Any], int]:
    """Return the kinds of the rows of an Arrow table; see :class:`Table`."""
    columns = schema.columns
    firsts: dict[tuple[Any, Any], int] = {}
    start = 0
    for chunk in table.column(columns.messages).chunks:
        for kind, position in _first_of_each_kind(chunk, schema.marked):
            firsts.setdefault(kind, start + position)
        start += len(chunk)
    for field in ("tools", "system"):
        if (name := getattr(columns, field)) in table.column_names:
            for position in pc.indices_nonzero(_is_filled(table.column(name)))[:1].to_pylist():
                firsts[field, None] = position
    return firsts


def column_problems(features: datasets.Features, columns: Columns) -> list[str]:
    """Return problems of columns with a wrong type: messages that are plain values, media that are not files."""
    messages = columns.messages
    wrong: dict[str, tuple[str, str]] = {}
    if messages in features and isinstance(_inner(features[messages]), datasets.Value):
        wrong[messages] = "messages", "messages"
    for field, name in columns.of_media().items():
        if name in features and not _holds_files(_inner(features[name])):
            wrong[name] = field, "files: {bytes, path}, bytes or paths"
    return [
        f"column {name!r} (columns.{field}) has type {_type_name(features[name])}, expected {expected}"
        for name, (field, expected) in wrong.items()
    ]


def undecoded_features(features: datasets.Features, columns: Columns) -> datasets.Features:
    """Return the features with media that stay encoded, so that a damaged file costs one row and not the run."""
    features = features.copy()
    for name in columns.of_media().values():
        if name in features:
            features[name] = _undecoded(features[name])
    return features


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_filled(values: pa.Array | pa.ChunkedArray) -> Any:
    """Return ``[n]`` bool: False for null and for empty lists."""
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    filled = pc.greater(pc.list_value_length(values), 0) if is_list else pc.is_valid(values)
    return pc.fill_null(filled, False)


def _inner(feature: Any) -> Any:
    return _inner(feature.feature) if isinstance(feature, _LISTS) else feature


def _holds_files(feature: Any) -> bool:
    if isinstance(feature, datasets.Value):
        return feature.dtype in ("string", "large_string", "binary", "large_binary", "null")
    return hasattr(feature, "decode") or (isinstance(feature, dict) and bool({"bytes", "path"} & feature.keys()))


def _type_name(feature: Any) -> str:
    inner = _inner(feature)
    name = inner.dtype if isinstance(inner, datasets.Value) else type(inner).__name__
    return name if inner is feature else f"lists of {name}"


def _first_of_each_kind(rows: pa.Array, marked: Collection[str]) -> list[tuple[tuple[Any, Any], int]]:
    """Return each kind and its first position in ``rows``, which are lists of turns."""
    if not _is_list_of_structs(rows.type):
        return []
    row_of_message, messages = pc.list_parent_indices(rows), pc.list_flatten(rows)
    fields = _fields(messages)
    roles = [pc.cast(fields[name], pa.string()) for name in FIELDS["role"] if name in fields]
    if not roles:
        return []
    every = pa.table({"role": pc.coalesce(*roles), "type": pa.nulls(len(messages), pa.string()), "row": row_of_message})
    tables = [every, *_where(every, _filled("message.", fields, SAID))]
    for contents in (fields[name] for name in FIELDS["content"] if name in fields):
        tables += _kinds_of_contents(contents, every, marked)
    found = pa.concat_tables(tables).group_by(["role", "type"]).aggregate([("row", "min")]).to_pylist()
    return [((kind["role"], kind["type"]), kind["row_min"]) for kind in found]


def _kinds_of_contents(contents: pa.Array, every: pa.Table, marked: Collection[str]) -> list[pa.Table]:
    """Return tables as ``every``, which has the role, type and row of each message, of what their contents have."""
    if _is_list_of_structs(contents.type) and "type" in (parts := _fields(pc.list_flatten(contents))):
        of_parts = every.take(pc.list_parent_indices(contents))
        types = of_parts.set_column(1, "type", pc.cast(parts["type"], pa.string()))
        return [types, *_where(of_parts, _filled("part.", parts, PART))]
    if pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type):
        return _where(every, ((m, pc.fill_null(pc.match_substring(contents, MARKERS[m]), False)) for m in marked))
    return []


def _where(every: pa.Table, kinds: Iterable[tuple[str, pa.Array]]) -> list[pa.Table]:
    """Return the rows of ``every`` in which each kind is, with its name as type; ``kinds``: name and ``[n]`` bool."""
    found = ((name, every.filter(at)) for name, at in kinds)
    return [table.set_column(1, "type", pa.repeat(name, len(table))) for name, table in found]


def _filled(prefix: str, fields: Mapping[str, pa.Array], known: Collection[str]) -> Iterator[tuple[str, pa.Array]]:
    """Yield each field that is not known as a kind, with where it has a value; and the fields of objects in it."""
    for name, values in fields.items():
        if name not in known:
            yield f"{prefix}{name}", _is_filled(values)
            if pa.types.is_struct(values.type):
                yield from _filled(f"{prefix}{name}.", _fields(values), ())


def _fields(structs: pa.Array) -> dict[str, pa.Array]:
    names = [structs.type.field(index).name for index in range(structs.type.num_fields)]
    return {name: pc.struct_field(structs, [index]) for index, name in enumerate(names)}


def _is_list_of_structs(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, _LISTS):
        return type(feature)(_undecoded(feature.feature))
    return type(feature)(decode=False) if hasattr(feature, "decode") else feature
