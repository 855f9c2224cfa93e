"""Read data sets as :class:`Row`: one message list with the files of its media."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets

from omnitrain.data.sources.arrow_table import ArrowTable
from omnitrain.data.sources.json_lines import JsonLines
from omnitrain.data.sources.turns import MARKERS, as_messages, role_of
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Columns, DataSource
from omnitrain.recipe.data import source_names
from omnitrain.recipe.suggest import nearest
from omnitrain.recipe.useless_keys import Idle, idle_problems

MODALITIES = ("image", "audio", "video")


@dataclass(frozen=True)
class Row:
    """One row of a data set.

    Attributes:
        id: unique name of the row.
        source: name of the source by which metrics are split.
        messages: ``[{"role": ..., "content": str | [{"type": ..., "text": ...}, ...]}, ...]``.
        media: modality -> encoded files (bytes or a path), in the order of the parts that show them.
        extra: all other columns, for scorers.
        tools: tools that the assistant may call, as in the column; None: none.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    media: dict[str, list[Any]]
    extra: dict[str, Any]
    tools: Any = None

    @property
    def question(self) -> list[dict[str, Any]]:
        """The messages that a model answers: all, without a last one of the assistant."""
        last = self.messages[-1] if self.messages else None
        is_answered = isinstance(last, dict) and last.get("role") == "assistant"
        return self.messages[:-1] if is_answered else self.messages

    def media_bytes(self, modality: str, position: int) -> bytes:
        """Return the encoded file of the ``position``-th part of ``modality``.

        Raises:
            ValueError: the row has fewer media than parts, or the file cannot be read.
        """
        values = self.media.get(modality, [])
        if position >= len(values):
            raise ValueError(
                f"the messages show {modality} {position + 1}, but the row has {len(values)} files; put files in a "
                f"separate column (`columns.{modality}s`)"
            )
        value = values[position]
        data = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(data, bytes):
            return data
        path = _path_of(value)
        if not path:
            raise ValueError(f"{modality} {position + 1} has neither bytes nor a path")
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ValueError(
                f"{modality} {position + 1} cannot be read from its file: {error}{_begins_in(Path(path))}"
            ) from error

    @contextmanager
    def naming_file(self, modality: str, position: int) -> Iterator[None]:
        """Name the file of :meth:`media_bytes` in a ``ValueError`` of the block; a ``UserError`` stays as it is."""
        try:
            yield
        except UserError:
            raise
        except ValueError as error:
            path = _path_of(self.media[modality][position])
            raise ValueError(f"{modality} {position + 1}{f' ({path})' if path else ''}: {error}") from error


def _path_of(file: Any) -> str | None:
    path = file.get("path") if isinstance(file, dict) else file
    return None if isinstance(path, bytes) or not path else str(path)


class Table(Protocol):
    """The records of a data set, by position. It can be pickled.

    Attributes:
        column_names: columns of all records.
    """

    column_names: list[str]

    @property
    def kinds(self) -> Mapping[tuple[Any, Any], int]:
        """``(role, type of part)`` of all records, or ``(role, None)`` -> position of the first record that has it."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict[str, Any]: ...

    def sources(self) -> list[Any]:
        """Return each record's value in the source column."""
        ...

    def problems(self) -> list[str]:
        """Return why its columns cannot be read, one text per problem."""
        ...


class RowSource(Sequence[Row]):
    """A data set with checked columns. Media stay encoded until a row is used."""

    def __init__(self, source: DataSource, name: str | None = None) -> None:
        """Open the data set.

        Args:
            source: the recipe's node of the data set.
            name: name in metrics, and in the ids of rows that have none. None: the name of ``source``, or the stem of
                its path.

        Raises:
            DataError: the data set does not exist, cannot be read, holds no rows, or lacks a column.
        """
        self._table = _open(source)
        self._length = min(len(self._table), source.limit or len(self._table))
        if not self._length:
            raise DataError(f"data: {source.path!r} holds no rows")
        if problems := _missing_columns(self._table.column_names, source) or self._table.problems():
            raise DataError(f"data: {source.path!r}: " + "; ".join(problems))
        self.name = name or source.name or Path(source.path).stem
        self.columns, self._marked = source.columns, frozenset(source.media_markers)
        self.takes_markers = bool(source.media_markers) or "media_markers" in source.model_fields_set
        if problems := idle_problems(source, _idle(source, self._table)):
            raise DataError(*(f"data: {source.path!r}: {problem}" for problem in problems))
        self._folder = None if source.media_folder is None else Path(source.media_folder)
        if self._folder is not None and not self._folder.is_dir():
            raise DataError(f"data: {source.path!r}: media_folder {source.media_folder!r} is not a folder")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Row:  # type: ignore[override]
        record = self._table[position]
        columns = self.columns
        media = {m: self._files(record.pop(getattr(columns, f"{m}s"), None)) for m in MODALITIES}
        return Row(
            id=_text(record.pop(columns.id, None), f"{self.name}[{position}]"),
            source=_text(record.pop(columns.source, None), self.name),
            messages=as_messages(record.pop(columns.messages), marked=self._marked),
            media=media,
            tools=record.pop(columns.tools, None),
            extra=record,
        )

    def _files(self, column: Any) -> list[Any]:
        """Return the files of a row as a list."""
        if column is None:
            return []
        files = list(column) if isinstance(column, (list, tuple)) else [column]
        return files if self._folder is None else [_located(file, self._folder) for file in files]

    def by_source(self) -> Mapping[str, Sequence[int]]:
        """Return source -> positions of its rows, in order of first appearance."""
        if self.columns.source not in self._table.column_names:
            return {self.name: range(len(self))}
        groups: dict[str, list[int]] = {}
        for position, name in enumerate(self._table.sources()[: len(self)]):
            groups.setdefault(_text(name, self.name), []).append(position)
        return groups

    def first_of_each_kind(self) -> list[int]:
        """Return the positions of the first row with each role, and with each type of part of each role.

        Tool calls count as a type of part, and so does a column of tools. Empty if the message column has no messages.
        """
        return sorted({position for position in self._table.kinds.values() if position < len(self)})

    @property
    def shown(self) -> frozenset[tuple[str, bool]]:
        """The modalities that the messages of all rows show, each with whether the assistant writes it."""
        return frozenset(
            (kind, role_of(role) == "assistant")
            for (role, kind), position in self._table.kinds.items()
            if kind in MODALITIES and position < len(self)
        )

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of rows of each part of the data set that is read at once; empty: rows are read one by one."""
        return ()


def open_sources(sources: Sequence[DataSource]) -> list[RowSource]:
    """Open every data set.

    Raises:
        DataError: data sets cannot be used; the message has one line per problem.
        UserError: ``sources`` are not data sources.
    """
    if [one for one in sources if not isinstance(one, DataSource)]:  # a string would iterate over its letters
        raise UserError(
            f"sources: found {sources!r}; expected a list of DataSource, such as [DataSource(path='rows.jsonl')]"
        )
    opened, problems = [], []
    for source, name in zip(sources, source_names(sources), strict=True):
        try:
            opened.append(RowSource(source, name))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(*problems)
    return opened


def _idle(source: DataSource, table: Table) -> Iterator[Idle]:
    """Yield keys that have no effect on this data set."""
    if _files(source.path):
        yield Idle("split", "but the path leads to files, which have no splits; remove it")
    shown = {kind for _, kind in table.kinds} if source.media_markers or source.media_folder else set()
    for modality in source.media_markers:
        if modality not in shown:
            why = f"but no text content has {MARKERS[modality]} (lists of parts are not searched); remove it"
            yield Idle("media_markers", why)
    if not shown & set(MODALITIES):
        yield Idle("media_folder", "but no message shows a medium; remove it, or see `media_markers`")


def _open(source: DataSource) -> Table:
    path, marked = Path(source.path), frozenset(source.media_markers)
    files = _files(source.path)
    is_lines = bool(files) and _is_lines(files[0])
    if files and files[0].endswith(".json"):
        raise DataError(
            f"data: {source.path!r}: found a .json file; expected parquet or JSON Lines (.jsonl), one row per line; "
            f"convert a list with jq -c '.[]' {files[0]} > {files[0]}l, or rename the file if it has one row per line"
        )
    try:
        if is_lines:
            return JsonLines(files, source.columns, marked=marked)
        if files:
            names = [glob.escape(str(Path(file).absolute())) for file in files]  # load_dataset treats names as globs
            return ArrowTable(
                datasets.load_dataset("parquet", data_files=names, split="train"), source.columns, marked=marked
            )
        if path.suffix or path.exists() or source.path.count("/") != 1:
            raise FileNotFoundError
        return ArrowTable(datasets.load_dataset(source.path, split=source.split), source.columns, marked=marked)
    except FileNotFoundError:
        raise DataError(
            f"data: no parquet or jsonl file at {source.path!r} (looked in {path.absolute()}){_nearest_file(path)}"
        ) from None
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        as_files = "as JSON Lines" if is_lines else "as parquet (JSON Lines end in .jsonl)"
        where = as_files if files else f"from the Hub, and no such folder exists ({path.absolute()})"
        raise DataError(f"data: {source.path!r} cannot be read {where}: {error.__cause__ or error}") from error


def _files(given: str) -> list[str]:
    """Return the files of a path, a folder or a glob; empty if there are none.

    Raises:
        DataError: JSON Lines are mixed with other files.
    """
    path = Path(given)
    if path.is_file():
        return [given]
    if path.is_dir():
        found = sorted(str(file) for kind in ("parquet", "jsonl") for file in path.glob(f"**/*.{kind}"))
    elif any(character in given for character in "*?["):
        root = Path(path.anchor)  # empty for a relative path
        found = sorted(str(file) for file in root.glob(str(path.relative_to(root)) if path.anchor else given))
    else:
        found = []
    lines = [file for file in found if _is_lines(file)]
    others = [file for file in found if not _is_lines(file)]
    if lines and others:
        inside = path / "**" if path.is_dir() else path.parent
        one, other = (str(inside / f"*.{kind}") for kind in ("parquet", "jsonl"))
        raise DataError(
            f"data: {given!r} has {len(lines)} file(s) of JSON Lines ({Path(lines[0]).name!r}, ...) and {len(others)} "
            f"other file(s) ({Path(others[0]).name!r}, ...); set `path` to {one!r} or {other!r}; to use both, list two "
            "data sets"
        )
    return found


def _is_lines(file: str) -> bool:
    return file.endswith(".jsonl")


def _nearest_file(path: Path) -> str:
    if path.is_dir():
        return ""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    close = nearest(path.name, (file.name for file in path.parent.iterdir()))
    return f"; did you mean {str(path.parent / close)!r}?" if close else ""


def _missing_columns(found: list[str], source: DataSource) -> list[str]:
    """Return problems if the message column, or a column whose name the recipe sets, is missing."""
    defaults = Columns()
    named = {field for field in Columns.model_fields if getattr(source.columns, field) != getattr(defaults, field)}
    wanted = {"messages", *named}
    problems = []
    for field in sorted(wanted):
        name = getattr(source.columns, field)
        if name not in found:
            close = nearest(name, found)
            if field == "messages":  # LLaVA and ShareGPT call this column `conversations`
                close = next((column for column in found if column.startswith("conversation")), close)
            hint = f"; set `columns.{field}: {close}`?" if close else f"; set `columns.{field}` to one of them"
            problems.append(f"column {name!r} (columns.{field}) is missing, found {found}{hint}")
    names = [getattr(source.columns, field) for field in Columns.model_fields]
    return problems + [
        f"column {name!r} has two roles in `columns`" for name in sorted({n for n in names if names.count(n) > 1})
    ]


def is_file(value: Any) -> bool:
    """Whether a value of a media column is a file; null, an empty path and empty bytes are not."""
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _text(value: Any, default: str) -> str:
    return default if value is None else str(value)


def _begins_in(path: Path) -> str:
    if path.is_absolute():
        return ""
    return f" in {Path.cwd()}; set `media_folder` of the data source to the folder of its media"


def _located(file: Any, folder: Path) -> Any:
    """Prepend ``folder`` to the path of a file, if it has one."""
    if isinstance(file, str) and file:
        return str(folder / file)
    if isinstance(file, dict) and file.get("path") and not file.get("bytes"):
        return file | {"path": str(folder / file["path"])}
    return file
