"""Data sets -> :class:`Row`, one message list with the bytes of its media."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets

from omnitrain.data.arrow_table import ArrowTable
from omnitrain.data.json_lines import JsonLines
from omnitrain.data.turns import as_messages
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import DataSource
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
        tools: what the assistant may call, as the column has it; None: nothing.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    media: dict[str, list[Any]]
    extra: dict[str, Any]
    tools: Any = None

    @property
    def question(self) -> list[dict[str, Any]]:
        """The messages that a model answers: all but a last one of the assistant."""
        last = self.messages[-1] if self.messages else None
        is_answered = isinstance(last, dict) and last.get("role") == "assistant"
        return self.messages[:-1] if is_answered else self.messages

    def media_bytes(self, modality: str, position: int) -> bytes:
        """The encoded file of the ``position``-th part of ``modality``.

        Raises:
            ValueError: the row has fewer media than parts, or the file cannot be read.
        """
        values = self.media.get(modality, [])
        if position >= len(values):
            raise ValueError(
                f"the messages show {modality} {position + 1}, the row holds {len(values)}; files belong into a column "
                f"beside the messages (`columns.{modality}s`)"
            )
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
            raise ValueError(
                f"{modality} {position + 1} cannot be read from its file: {error}{_begins_in(Path(path))}"
            ) from error


class Table(Protocol):
    """Records of a data set, by position; it can be pickled.

    Attributes:
        column_names: of all records.
    """

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict[str, Any]: ...

    def sources(self) -> list[Any]:
        """The value of each record in the column of sources."""
        ...

    def first_of_each_kind(self) -> list[int]:
        """See :meth:`RowSource.first_of_each_kind`."""
        ...

    def problems(self) -> list[str]:
        """What keeps its columns from being read."""
        ...


class RowSource(Sequence[Row]):
    """A data set whose columns were checked; media stay encoded until a row is used."""

    def __init__(self, source: DataSource, name: str | None = None) -> None:
        """Open the data set.

        Args:
            source: which one.
            name: in metrics, and of rows without an id; None: the source's own, or the stem of its path.

        Raises:
            DataError: it does not exist, cannot be read, or lacks a column.
        """
        self._table = _open(source)
        if problems := _missing_columns(self._table.column_names, source) or self._table.problems():
            raise DataError(f"data: {source.path!r}: " + "; ".join(problems))
        self.name = name or source.name or Path(source.path).stem
        self.columns, self._marked = source.columns, frozenset(source.media_markers)
        self._folder = None if source.media_folder is None else Path(source.media_folder)
        if self._folder is not None and not self._folder.is_dir():
            raise DataError(f"data: {source.path!r}: media_folder {source.media_folder!r} is no folder")

    def __len__(self) -> int:
        return len(self._table)

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
        """The media of a row: one, or several, or none."""
        if column is None:
            return []
        files = list(column) if isinstance(column, (list, tuple)) else [column]
        return files if self._folder is None else [_located(file, self._folder) for file in files]

    def by_source(self) -> dict[str, list[int]]:
        """Source -> positions of its rows, in order of first appearance."""
        if self.columns.source not in self._table.column_names:
            return {self.name: list(range(len(self)))}
        groups: dict[str, list[int]] = {}
        for position, name in enumerate(self._table.sources()):
            groups.setdefault(_text(name, self.name), []).append(position)
        return groups

    def first_of_each_kind(self) -> list[int]:
        """Positions of the first row with each role, and of the first in which each role says each type of part.

        Calls of tools count as a type of part, and so does a column of tools.

        Empty where the message column does not hold messages.
        """
        return self._table.first_of_each_kind()


def open_sources(sources: Sequence[DataSource]) -> list[RowSource]:
    """Open every data set.

    Raises:
        DataError: all that is wrong with any of them, a line each.
        UserError: they are no data sources.
    """
    if [one for one in sources if not isinstance(one, DataSource)]:  # of a string, its letters
        raise UserError(
            f"sources: found {sources!r}; expected a list of DataSource, such as [DataSource(path='rows.jsonl')]"
        )
    opened, problems = [], []
    for source, name in zip(sources, _names(sources), strict=True):
        try:
            opened.append(RowSource(source, name))
            if not len(opened[-1]):
                problems.append(f"data: no rows in {source.path!r}")
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return opened


def _names(sources: Sequence[DataSource]) -> list[str]:
    """Of each its own, or else the end of its path, by which no other one is called."""
    paths = list(dict.fromkeys(Path(source.path) for source in sources if source.name is None))
    return [source.name or _end_of(Path(source.path), paths) for source in sources]


def _end_of(path: Path, paths: Sequence[Path]) -> str:
    """The stem of ``path``, with as many folders in front as tell it from the others among ``paths``."""
    for depth in range(1, len(path.parts) + 1):
        ends = [(*one.parts[:-1], one.stem)[-depth:] for one in (path, *paths)]
        if ends.count(ends[0]) == 2:  # it is among them
            return "/".join(ends[0])
    return path.name


def _open(source: DataSource) -> Table:
    path, marked = Path(source.path), frozenset(source.media_markers)
    files = _files(source.path)
    is_lines = bool(files) and _is_lines(files[0])
    if files and files[0].endswith(".json"):
        raise DataError(
            f"data: {source.path!r}: found a .json file; expected parquet or JSON Lines (.jsonl), a row per line; make "
            f"lines of a list by jq -c '.[]' {files[0]} > {files[0]}l, or rename a file of lines"
        )
    try:
        if is_lines:
            return JsonLines(files, source.columns, marked=marked)
        if files:
            names = [glob.escape(str(Path(file).absolute())) for file in files]  # it takes each for a glob
            return ArrowTable(
                datasets.load_dataset("parquet", data_files=names, split="train"), source.columns, marked=marked
            )
        if path.suffix or path.exists() or source.path.count("/") != 1:
            raise FileNotFoundError
        return ArrowTable(datasets.load_dataset(source.path, split=source.split), source.columns, marked=marked)
    except FileNotFoundError:
        raise DataError(
            f"data: no parquet or jsonl file at {source.path!r} (looked at {path.absolute()}){_nearest_file(path)}"
        ) from None
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        as_files = "as JSON Lines" if is_lines else "as parquet (JSON Lines end in .jsonl)"
        where = as_files if files else f"from the Hub, and there is no such folder ({path.absolute()})"
        raise DataError(f"data: {source.path!r} cannot be read {where}: {error.__cause__ or error}") from error


def _files(given: str) -> list[str]:
    """The files that a path, a folder or a glob names; empty: none.

    Raises:
        DataError: there are others beside JSON Lines.
    """
    path = Path(given)
    if path.is_file():
        return [given]
    if path.is_dir():
        found = sorted(str(file) for kind in ("parquet", "jsonl") for file in path.glob(f"**/*.{kind}"))
    elif any(character in given for character in "*?["):
        found = sorted(map(str, Path().glob(given))) if not path.is_absolute() else _glob(path)
    else:
        found = []
    lines = [file for file in found if _is_lines(file)]
    others = [file for file in found if not _is_lines(file)]
    if lines and others:
        inside = path / "**" if path.is_dir() else path.parent
        one, other = (str(inside / f"*.{kind}") for kind in ("parquet", "jsonl"))
        raise DataError(
            f"data: {given!r} holds {len(lines)} file(s) of JSON Lines ({Path(lines[0]).name!r}, ...) beside "
            f"{len(others)} other(s) ({Path(others[0]).name!r}, ...); set `path` to {one!r} or {other!r}; both are two "
            "data sets"
        )
    return found


def _is_lines(file: str) -> bool:
    return file.endswith(".jsonl")


def _glob(path: Path) -> list[str]:
    root = Path(path.anchor)
    return sorted(str(file) for file in root.glob(str(path.relative_to(root))))


def _nearest_file(path: Path) -> str:
    if path.is_dir():
        return ""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    close = nearest(path.name, (file.name for file in path.parent.iterdir()))
    return f"; did you mean {str(path.parent / close)!r}?" if close else ""


def _missing_columns(found: list[str], source: DataSource) -> list[str]:
    """The message column must exist, and so must every one that the recipe calls other than by default.

    A saved recipe has the defaults in it, and means by them no more than the recipe that left them out.
    """
    fields = type(source.columns).model_fields
    problems = []
    for field in sorted(fields):
        name = getattr(source.columns, field)
        if field != "messages" and name == fields[field].default:
            continue
        if name not in found:
            close = nearest(name, found)
            if field == "messages":  # as LLaVA and ShareGPT call them
                close = next((column for column in found if column.startswith("conversation")), close)
            hint = f"; set `columns.{field}: {close}`?" if close else f"; set `columns.{field}` to one of them"
            problems.append(f"column {name!r} (columns.{field}) is missing, found {found}{hint}")
    named = [getattr(source.columns, field) for field in type(source.columns).model_fields]
    return problems + [
        f"column {name!r} has two roles in `columns`" for name in sorted({n for n in named if named.count(n) > 1})
    ]


def _text(value: Any, default: str) -> str:
    return default if value is None else str(value)


def _begins_in(path: Path) -> str:
    if path.is_absolute():
        return ""
    return f" in {Path.cwd()}; `media_folder` of a data source says where the paths of its media begin"


def _located(file: Any, folder: Path) -> Any:
    """A medium whose relative path begins in ``folder``; an empty path is none."""
    if isinstance(file, str) and file:
        return str(folder / file)
    if isinstance(file, dict) and file.get("path") and not file.get("bytes"):
        return file | {"path": str(folder / file["path"])}
    return file
