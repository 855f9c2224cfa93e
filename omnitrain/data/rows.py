"""Parquet (or Hub) data sets -> :class:`Row`, one message list with the bytes of its media."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from omnitrain.errors import DataError
from omnitrain.recipe import Columns, DataSource
from omnitrain.recipe.suggest import nearest

MODALITIES = ("image", "audio", "video")


@dataclass(frozen=True)
class Row:
    """One row of a data set.

    Attributes:
        id: unique name of the row.
        source: metrics are split by it.
        messages: ``[{"role": ..., "content": str | [{"type": ..., "text": ...}, ...]}, ...]``.
        media: modality -> encoded files (bytes or a path), in the order of the parts that show them.
        extra: all other columns, for scorers.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    media: dict[str, list[Any]]
    extra: dict[str, Any]

    def media_bytes(self, modality: str, position: int) -> bytes:
        """The encoded file of the ``position``-th part of ``modality``.

        Raises:
            ValueError: the row has fewer media than parts, or the file cannot be read.
        """
        values = self.media.get(modality, [])
        if position >= len(values):
            raise ValueError(f"the messages show {modality} {position + 1}, the row holds {len(values)}")
        value = values[position]
        data = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(data, bytes):
            return data
        path = value.get("path") if isinstance(value, dict) else value
        if not path:
            raise ValueError(f"{modality} {position + 1} has neither bytes nor a path")
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{modality} {position + 1} cannot be read from its file: {error}") from error


class RowSource(Sequence[Row]):
    """A data set whose columns were checked; media stay encoded until a row is used."""

    def __init__(self, source: DataSource) -> None:
        """Open the data set.

        Raises:
            DataError: it does not exist, cannot be read, or lacks a column.
        """
        table = _open(source)
        _check_columns(table.column_names, source)
        _check_types(table.features, source)
        self.name = source.name or Path(source.path).stem
        self.columns = source.columns
        self._table = _keep_encoded(table, source.columns)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, position: int) -> Row:  # type: ignore[override]
        record = dict(self._table[position])
        columns = self.columns
        media = {m: _as_list(record.pop(getattr(columns, f"{m}s"), None)) for m in MODALITIES}
        return Row(
            id=str(record.pop(columns.id, f"{self.name}[{position}]")),
            source=str(record.pop(columns.source, self.name)),
            messages=record.pop(columns.messages),
            media=media,
            extra=record,
        )

    def by_source(self) -> dict[str, list[int]]:
        """Source -> positions of its rows, in order of first appearance."""
        if self.columns.source not in self._table.column_names:
            return {self.name: list(range(len(self)))}
        groups: dict[str, list[int]] = {}
        for position, name in enumerate(self._table[self.columns.source]):
            groups.setdefault(str(name), []).append(position)
        return groups

    def first_of_each_kind(self) -> list[int]:
        """Positions of the first row with each role, and of the first in which each role says each type of part.

        Read off the message column, without its texts or any media; empty where that is not messages with parts.
        """
        firsts: dict[tuple[Any, Any], int] = {}
        start = 0
        for chunk in self._table.data.column(self.columns.messages).chunks:
            for kind, position in _first_of_each_kind(chunk):
                firsts.setdefault(kind, start + position)
            start += len(chunk)
        return sorted(set(firsts.values()))


def open_sources(sources: Sequence[DataSource]) -> list[RowSource]:
    """Open every data set.

    Raises:
        DataError: all that is wrong with any of them, a line each.
    """
    opened, problems = [], []
    for source in sources:
        try:
            opened.append(RowSource(source))
            if not len(opened[-1]):
                problems.append(f"data: no rows in {source.path!r}")
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return opened


def _open(source: DataSource) -> datasets.Dataset:
    path = Path(source.path)
    if path.is_dir():
        files = sorted(str(file) for file in path.glob("**/*.parquet"))
    elif not path.is_file() and any(character in source.path for character in "*?["):
        files = sorted(str(file) for file in Path().glob(source.path)) if not path.is_absolute() else _glob(path)
    else:
        files = [source.path] if path.is_file() else []
    try:
        if files:
            names = [glob.escape(str(Path(file).absolute())) for file in files]  # it takes each for a glob
            return datasets.load_dataset("parquet", data_files=names, split="train")
        if path.suffix or path.exists() or source.path.count("/") != 1:
            raise FileNotFoundError
        return datasets.load_dataset(source.path, split=source.split)
    except FileNotFoundError:
        raise DataError(
            f"data: no parquet file at {source.path!r} (looked at {path.absolute()}){_nearest_file(path)}"
        ) from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        where = "as parquet" if files else f"from the Hub, and there is no such folder ({path.absolute()})"
        raise DataError(f"data: {source.path!r} cannot be read {where}: {error.__cause__ or error}") from error


def _glob(path: Path) -> list[str]:
    root = Path(path.anchor)
    return sorted(str(file) for file in root.glob(str(path.relative_to(root))))


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    close = nearest(path.name, (file.name for file in path.parent.iterdir()))
    return f"; did you mean {str(path.parent / close)!r}?" if close else ""


def _check_columns(found: list[str], source: DataSource) -> None:
    """The message column must exist, and so must every column that the recipe names explicitly."""
    wanted = {"messages", *source.columns.model_fields_set}
    problems = []
    for field in sorted(wanted):
        name = getattr(source.columns, field)
        if name not in found:
            close = nearest(name, found)
            hint = f"; set `columns.{field}: {close}`?" if close else f"; set `columns.{field}` to one of them"
            problems.append(f"column {name!r} (columns.{field}) is missing, found {found}{hint}")
    named = [getattr(source.columns, field) for field in type(source.columns).model_fields]
    problems += [
        f"column {name!r} has two roles in `columns`" for name in sorted({n for n in named if named.count(n) > 1})
    ]
    if problems:
        raise DataError(f"data: {source.path!r}: " + "; ".join(problems))


def _check_types(features: datasets.Features, source: DataSource) -> None:
    """What no row can be made of: messages that are plain values, media that are neither files nor their paths."""
    problems = []
    messages = source.columns.messages
    if isinstance(_inner(features[messages]), datasets.Value):
        problems.append(
            f"column {messages!r} (columns.messages) holds {_type_name(features[messages])}, expected messages"
        )
    for field in (f"{modality}s" for modality in MODALITIES):
        name = getattr(source.columns, field)
        if name in features and not _holds_files(_inner(features[name])):
            found = _type_name(features[name])
            problems.append(
                f"column {name!r} (columns.{field}) holds {found}, expected files: {{bytes, path}}, bytes or paths"
            )
    if problems:
        raise DataError(f"data: {source.path!r}: " + "; ".join(problems))


def _inner(feature: Any) -> Any:
    return _inner(feature.feature) if isinstance(feature, (datasets.List, datasets.LargeList)) else feature


def _holds_files(feature: Any) -> bool:
    if isinstance(feature, datasets.Value):
        return feature.dtype in ("string", "large_string", "binary", "large_binary", "null")
    return hasattr(feature, "decode") or (isinstance(feature, dict) and bool({"bytes", "path"} & feature.keys()))


def _type_name(feature: Any) -> str:
    inner = _inner(feature)
    name = inner.dtype if isinstance(inner, datasets.Value) else type(inner).__name__
    return name if inner is feature else f"lists of {name}"


def _first_of_each_kind(rows: pa.Array) -> list[tuple[tuple[Any, Any], int]]:
    """``(role, type of part)`` and its first position; rows: ``[{"role": ..., "content": str | [{"type": ...}]}]``."""
    if not _is_list_of(rows.type, "role", "content"):
        return []
    row_of_message, messages = pc.list_parent_indices(rows), pc.list_flatten(rows)
    roles, contents = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    kinds = pa.table({"role": roles, "type": pa.nulls(len(roles), pa.string()), "row": row_of_message})
    if _is_list_of(contents.type, "type"):
        message_of_part = pc.list_parent_indices(contents)
        types = pc.struct_field(pc.list_flatten(contents), "type")
        said = {"role": roles.take(message_of_part), "type": types, "row": row_of_message.take(message_of_part)}
        kinds = pa.concat_tables([kinds, pa.table(said)], promote_options="permissive")
    found = kinds.group_by(["role", "type"]).aggregate([("row", "min")]).to_pylist()
    return [((kind["role"], kind["type"]), kind["row_min"]) for kind in found]


def _is_list_of(kind: pa.DataType, *fields: str) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    return all(kind.value_type.get_field_index(field) >= 0 for field in fields)


def _keep_encoded(table: datasets.Dataset, columns: Columns) -> datasets.Dataset:
    """Switch off decoding in the data set: a damaged file must cost one row, not the run."""
    features = table.features.copy()
    for modality in MODALITIES:
        name = getattr(columns, f"{modality}s")
        if name in features:
            features[name] = _undecoded(features[name])
    return table.cast(features) if features != table.features else table


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature))
    return type(feature)(decode=False) if hasattr(feature, "decode") else feature


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
