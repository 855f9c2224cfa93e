"""Read data sets as :class:`Row`: one message list with the files of its media."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from omnitrain.data.sources.documents import Document, TextFiles
from omnitrain.data.sources.files import FileReader, ReadError, is_url
from omnitrain.data.sources.formats import files_of, open_table, suffix_of
from omnitrain.data.sources.inline_files import as_file, is_inline
from omnitrain.data.sources.json_lines import kinds_of
from omnitrain.data.sources.media import MediaFile
from omnitrain.data.sources.part_files import is_file, modality_of_type
from omnitrain.data.sources.reading import UNSAID, Reading, part_and_reading
from omnitrain.data.sources.schema import required
from omnitrain.data.sources.stream import Stream
from omnitrain.data.sources.tar_shards import TarShards
from omnitrain.data.sources.turns import MARKERS, role_of
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Columns, DataSource
from omnitrain.recipe.data import VISUAL_KEYS, source_names
from omnitrain.recipe.strict import Idle, idle_problems
from omnitrain.recipe.suggest import nearest

MODALITIES = ("image", "audio", "video")
_OTHER_ROWS = ", or `columns.prompt` and `columns.response`, or `columns.text` for documents"


@dataclass(frozen=True)
class Row:
    """One row of a data set."""

    id: str  # unique name of the row
    source: str  # name of the source by which metrics are split
    messages: list[dict[str, Any]]  # with `role`, `content` (a text, or parts with `type`), perhaps `tool_calls`
    media: dict[str, list[Any]]  # modality -> encoded files (bytes or a path), in the order of the parts that show them
    extra: dict[str, Any]  # all other columns, for scorers
    tools: Any = None  # tools that the assistant may call, as in the column; None: none
    document: Document | None = None  # a text to train on in place of messages
    problem: str = ""  # why the row cannot be read; empty if it can
    reader: FileReader = field(default_factory=FileReader)  # reads the files of its media
    reading: Reading = UNSAID  # how its images and videos are read, as far as the data set says it
    encoders: Sequence[str] | None = None  # those that read its media; None: all of their modality
    decoders: Sequence[str] | None = None  # those that write the media of its answers; None: the only ones

    @property
    def question(self) -> list[dict[str, Any]]:
        """The messages that a model answers: all, without a last one of the assistant."""
        last = self.messages[-1] if self.messages else None
        is_answered = isinstance(last, dict) and last.get("role") == "assistant"
        return self.messages[:-1] if is_answered else self.messages

    def named(self, error: UserError) -> UserError:
        """Return an error that this row causes, with the row's name."""
        return UserError(f"row {self.id!r} of {self.source!r}: {error}")

    def with_content(self, read: Callable[[], dict[str, Any]]) -> Row:
        """Return the row with the fields that ``read`` returns, or with the problem that it raises as ValueError."""
        try:
            return replace(self, **read())
        except UserError as error:
            raise self.named(error) from error
        except ValueError as error:
            return replace(self, problem=str(error))

    def media_bytes(self, modality: str, position: int) -> bytes:
        """Return the encoded file of the ``position``-th part of ``modality``; errors as of :meth:`open_media`."""
        with self.open_media(modality, position) as file:
            return file.begun().read()

    @contextmanager
    def open_media(self, modality: str, position: int) -> Iterator[MediaFile]:
        """Open the encoded file of the ``position``-th part of ``modality``, as far as it is needed.

        A ``ValueError`` of the block names the file. Raises ValueError: there is no such file, or no such part of it.
        """
        values, place = self.media.get(modality, []), f"{modality} {position + 1}"
        if position >= len(values):
            raise ValueError(
                f"the messages show {place}, but the row has {len(values)} files; put files in a separate column "
                f"(`columns.{modality}s`)"
            )
        try:
            value = as_file(values[position])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        path = value.get("path") if isinstance(value, dict) else value
        path = None if isinstance(path, bytes) or not path else str(path)
        start, stop, reading = part_and_reading(value, modality, place)
        with self._opened(value, path, place) as stream:
            try:
                yield MediaFile(stream, start, stop, reading.over(self.reading))
            except UserError:
                raise
            except ValueError as error:
                raise ValueError(f"{place}{f' ({path})' if path else ''}: {error}") from error

    def _opened(self, file: Any, path: str | None, place: str) -> BinaryIO:
        data = file.get("bytes") if isinstance(file, dict) else file
        if isinstance(data, bytes) and (data or not path):
            return io.BytesIO(data)
        if not path:
            raise ValueError(f"{place} has neither bytes nor a path")
        try:
            return io.BytesIO(self.reader.read(path)) if is_url(path) else open(path, "rb")
        except OSError as error:
            hint = f" in {Path.cwd()}; set `media_folder` of the data source to the folder of its media"
            raise ValueError(
                f"{place} cannot be read from its file: {error}{'' if Path(path).is_absolute() else hint}"
            ) from error


class RowSource(Sequence[Row]):
    """A data set with checked columns. Media stay encoded until a row is used.

    ``is_stream``: its rows are asked for in order. ``takes_markers``: the recipe says which modalities texts mark.
    """

    def __init__(self, source: DataSource, name: str | None = None) -> None:
        """Open a data set; ``name``: in metrics and ids. DataError: it cannot be read, is empty, or lacks a column."""
        files, self._folder = files_of(source)
        self._reader, self.sample_seconds = FileReader(source.read_seconds), source.sample_seconds
        self.encoders, self.decoders = source.encoders, source.decoders
        self._reading = Reading(**{key: getattr(source, key) for key in VISUAL_KEYS})
        self._table = open_table(source, files, self._reader)
        self.schema, self.columns = self._table.schema, self._table.schema.columns
        self._length = min(len(self._table), source.limit or len(self._table))
        if not self._length:
            raise DataError(f"data: {source.path!r} holds no rows")
        self._has_documents = self.columns.text is not None or isinstance(self._table, TextFiles)
        needs_messages = self.columns.response is None and not self._has_documents
        missing = _missing_columns(self._table.column_names, source, self.columns, needs_messages=needs_messages)
        if problems := missing or self._table.problems():
            raise DataError(f"data: {source.path!r}: " + "; ".join(problems))
        self.is_stream = isinstance(self._table, Stream)
        self.name = name or source.name or Path(source.path).stem
        self.takes_markers = source.media_markers is not None
        if self._folder is not None and not is_url(self._folder) and not Path(self._folder).is_dir():
            raise DataError(f"data: {source.path!r}: media_folder {source.media_folder!r} is not a folder")
        with _or_data_error(source.path):
            kinds = self.kinds
        if problems := idle_problems(source, _idle(source, files, kinds)):
            raise DataError(*(f"data: {source.path!r}: {problem}" for problem in problems))

    def __len__(self) -> int:
        """Return the number of rows; of a stream without a limit, a number that no run reaches."""
        return self._length

    def skip(self, rows: int) -> None:
        """Let a stream begin after its first rows, for which nobody will ask. Other data sets need not be told."""
        if isinstance(self._table, Stream):
            self._table.skip(rows)

    def __getitem__(self, position: int) -> Row:  # type: ignore[override]
        """Return a row; one that cannot be read has a ``problem``; UserError: an unknown role."""
        return self._read(self._table.__getitem__, position)

    def outline(self, position: int) -> Row:
        """Return a row; in the place of a medium's bytes may be whether there are any."""
        return self._read(self._table.outline, position)

    def _read(self, record_at: Callable[[int], dict[str, Any]], position: int) -> Row:
        try:
            return self._row(position, record_at(position))
        except ReadError as error:
            return Row(f"{self.name}[{position}]", self.name, [], {}, {}, problem=str(error))

    def _row(self, position: int, record: dict[str, Any]) -> Row:
        record = dict.fromkeys(self._table.column_names) | record  # a record may lack columns
        row, media = row_of(record, self.columns, f"{self.name}[{position}]", self.name)
        located = {m: self._located(files) for m, files in media.items()}
        row = replace(row, media=located, reader=self._reader, reading=self._reading)
        row = replace(row, encoders=self.encoders, decoders=self.decoders)
        return row.with_content(lambda: self._content(record, media))

    def _content(self, record: dict[str, Any], media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Take the document or the messages out of a record."""
        name = self.columns.text
        if self._has_documents:
            text = record.pop(name or "text")
            return {"document": text if isinstance(text, Document) else Document(required(text, name))}
        if self.columns.response is not None and (lacking := self._lacking(record, media)):
            raise ValueError(f"the row has no file in {' and '.join(lacking)}")
        messages, files = self.schema.conversation(record, media)
        return {"messages": messages, "media": {m: self._located(files[m]) for m in MODALITIES}}

    def _lacking(self, record: Mapping[str, Any], media: Mapping[str, Sequence[Any]]) -> list[str]:
        """Return file columns that a row with a response lacks: in a tar shard any, else all without a prompt."""
        names = {m: getattr(self.columns, f"{m}s") for m in MODALITIES}
        held = [m for m, name in names.items() if name in self._table.column_names]
        empty = [f"{names[m]!r} (columns.{m}s)" for m in held if not any(map(is_file, media[m]))]
        needs_all = isinstance(self._table, TarShards)
        has_prompt = any(record.get(name) != "" for name in self.columns.prompts)
        return empty if needs_all or (len(empty) == len(held) and not has_prompt) else []

    def _located(self, files: list[Any]) -> list[Any]:
        """Return files whose paths begin with the folder of the media."""
        return files if self._folder is None else [_located(file, self._folder) for file in files]

    def by_source(self) -> Mapping[str, Sequence[int]]:
        """Return source -> positions of its rows, in order of first appearance."""
        with _or_data_error(self.name):
            sources = self._table.sources() if self.columns.source in self._table.column_names else None
        if sources is None:  # it is known when a row is read, if at all
            return {self.name: range(len(self))}
        groups: dict[str, list[int]] = {}
        for position, name in enumerate(sources[: len(self)]):
            groups.setdefault(_text(name, self.name), []).append(position)
        return groups

    def first_of_each_kind(self) -> list[int]:
        """Return the positions of the first row of each kind. Empty if the message column has no messages."""
        return sorted({position for position in self.kinds.values() if position < len(self)})

    @cached_property
    def kinds(self) -> Mapping[tuple[Any, Any], int]:
        """Kind of messages -> position of the first row that has it; see :class:`Table`.

        Types of parts are modalities here. If the table has no messages of its own, some rows show the kinds.
        """
        if self._has_documents:
            return {("document", None): 0}
        found: Iterable[tuple[tuple[Any, Any], int]] = self._kinds_of_examples()
        if self.columns.response is None and self._table.kinds is not None:
            found = chain(self._table.kinds.items(), found if self.schema.makes_messages else ())
        firsts: dict[tuple[Any, Any], int] = {}
        for (role, kind), position in found:
            key = role, modality_of_type(kind)
            firsts[key] = min(position, firsts.get(key, position))
        return firsts

    def _kinds_of_examples(self) -> Iterator[tuple[tuple[Any, Any], int]]:
        for position, record in self._table.examples(len(self)):
            if self.schema.makes_messages:
                row = self._row(position, record)
                record = {self.columns.messages: row.messages, self.columns.tools or "": row.tools}
            yield from ((kind, position) for kind in kinds_of(record, self.schema))

    @property
    def shown(self) -> frozenset[tuple[str, bool]]:
        """The modalities that the messages of all rows show, each with whether the assistant writes it."""
        return frozenset(
            (kind, role_of(role, self.schema.roles) == "assistant")
            for (role, kind), position in self.kinds.items()
            if kind in MODALITIES and position < len(self)
        )

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of rows of each part of the data set that is read at once; empty: rows are read one by one."""
        ends = np.minimum(np.cumsum(self._table.blocks), self._length)
        return tuple(size for size in np.diff(ends, prepend=0).tolist() if size)


@contextmanager
def _or_data_error(name: str) -> Iterator[None]:
    """Name the data set if what it needs from a URL at the start does not arrive."""
    try:
        yield
    except ReadError as error:
        raise DataError(f"data: {name!r}: {error}") from error


def open_sources(sources: Sequence[DataSource]) -> list[RowSource]:
    """Open every data set; DataError: one line per unusable one; UserError: ``sources`` are not data sources."""
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


def _idle(source: DataSource, files: Sequence[str], kinds: Mapping[tuple[Any, Any], int]) -> Iterator[Idle]:
    """Yield keys that have no effect on this data set."""
    if files:
        for key, what in (("split", "splits"), ("subset", "subsets"), ("revision", "revisions")):
            yield Idle(key, f"but the path leads to files, which have no {what}; remove it")
        yield Idle("streaming", "but the path leads to files, which are read where they are; remove it")
        if suffix_of(files[0]) != ".parquet":
            yield Idle("copy_parquet", "but the files are no parquet files; remove it")
    if files and not is_url(f"{files[0]}{source.media_folder or ''}"):
        yield Idle("read_seconds", "but neither the files nor `media_folder` are a URL; remove it")
    shown = {kind for _, kind in kinds}
    for modality in source.media_markers or ():
        if modality not in shown:
            why = f"but no text content has {MARKERS[modality]} (lists of parts are not searched); remove it"
            yield Idle("media_markers", why)
    if not shown & set(MODALITIES):
        for key in ("media_folder", "encoders", "decoders"):
            yield Idle(key, "but no message shows a medium; remove it, or see `media_markers`")
    for key, modalities in VISUAL_KEYS.items():
        if not shown & set(modalities):
            yield Idle(key, f"but no message shows {' or '.join(modalities)}; remove it")


def _missing_columns(found: Sequence[str], source: DataSource, columns: Columns, *, needs_messages: bool) -> list[str]:
    """Return problems if the message column, or a column whose name the recipe sets, is missing."""
    defaults, found = Columns(), list(found)
    named = {name for name, given in source.columns if given is not None and given != getattr(defaults, name)}
    wanted = {"messages", *named} if needs_messages else named
    problems = []
    for key in sorted(wanted):
        given = getattr(columns, key)
        others = _OTHER_ROWS if key == "messages" else ""
        for name in (given,) if isinstance(given, str) else given:
            if name not in found:
                close = nearest(name, found)
                hint = f"; set `columns.{key}: {close}`?" if close else f"; set `columns.{key}` to one of them{others}"
                problems.append(f"column {name!r} (columns.{key}) is missing, found {found}{hint}")
    names = columns.names()
    return problems + [
        f"column {name!r} has two roles in `columns`" for name in sorted({n for n in names if names.count(n) > 1})
    ]


def row_of(record: dict[str, Any], columns: Columns, name: str, source: str) -> tuple[Row, dict[str, list[Any]]]:
    """Take a row without content, and files by modality, out of a record; ``name``, ``source``: if it has none."""
    held = {m: record.pop(getattr(columns, f"{m}s"), None) for m in MODALITIES}
    media = {m: list(one) if isinstance(one, (list, tuple)) else [one] * (one is not None) for m, one in held.items()}
    row = Row(
        id=_text(record.pop(columns.id, None), name),
        source=_text(record.pop(columns.source, None), source),
        messages=[],
        media=media,
        tools=columns.tools and record.pop(columns.tools, None),
        extra=record,
    )
    return row, media


def _text(value: Any, default: str) -> str:
    return default if value is None else str(value)


def _located(file: Any, folder: str) -> Any:
    """Prepend ``folder`` to the path of a file, if it has one."""
    if isinstance(file, str) and file:
        if is_url(file) or is_inline(file):
            return file
        return f"{folder.rstrip('/')}/{file}" if is_url(folder) else str(Path(folder, file))
    if isinstance(file, dict) and file.get("path") and not file.get("bytes"):
        return file | {"path": _located(file["path"], folder)}
    return file
