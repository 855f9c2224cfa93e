"""Find media that the messages of a data set do not show, and components that get no training data.

A model would train on such data without an error and learn nothing from the media. The messages of all rows are known;
files are searched in the first :data:`LOOKED_AT` rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any

from PIL import Image

from omnitrain.data.chat.parts import Message, content_parts
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import Renderer
from omnitrain.data.sources.inline_files import modality_of_bytes
from omnitrain.data.sources.part_files import FILE_KEYS, is_file
from omnitrain.data.sources.rows import MODALITIES, Row, RowSource
from omnitrain.data.sources.turns import FIELDS, MARKERS, PART, how_to_show
from omnitrain.errors import UserError
from omnitrain.recipe import Recipe

LOOKED_AT = 32  # rows of each data set

_SUFFIXES = {
    "image": (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"),
    "audio": (".aac", ".flac", ".m4a", ".mp3", ".ogg", ".opus", ".wav"),
    "video": (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"),
}


def require_shown(
    train: Sequence[RowSource], heldout: Sequence[RowSource], processor: OmniProcessor, spared: Collection[str]
) -> None:
    """Raise UserError for media that no message shows, and for components (but ``spared``) without data."""
    hidden = chain.from_iterable(_hidden(source, processor) for source in (*train, *heldout))
    if problems := dict.fromkeys([*hidden, *_unfed(train, processor, spared)]):
        raise UserError(*problems)


def _unfed(train: Sequence[RowSource], processor: OmniProcessor, spared: Collection[str]) -> Iterator[str]:
    for kind, of_modality, is_target in (("encoders", processor.readers, False), ("decoders", processor.writers, True)):
        for name, modalities in _modalities(of_modality).items():
            named = [source.decoders if is_target else source.encoders for source in train]
            given = [source for source, names in zip(train, named, strict=True) if names is None or name in names]
            shown = frozenset(chain.from_iterable(source.shown for source in given))
            if name not in spared and not any((modality, is_target) in shown for modality in modalities):
                who = "an assistant" if is_target else "a user"
                but = f" with it among its `{kind}`" if len(given) < len(train) else ""
                yield (
                    f"model.{kind}.{name}: no message of {who} in data.train{but} shows {' or '.join(modalities)}, so "
                    f"{name!r} would learn nothing: set `columns.{modalities[0]}s` to the column of the files; "
                    f"{how_to_show(modalities[0])}; or remove {name!r}, or freeze it if it is in `model.checkpoint`"
                )


def _modalities(of_modality: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Component -> its modalities, from modality -> components."""
    found: dict[str, list[str]] = {}
    for modality, names in of_modality.items():
        for name in names:
            found.setdefault(name, []).append(modality)
    return found


def _hidden(source: RowSource, processor: OmniProcessor) -> Iterator[str]:
    """Yield problems of a data set: media that no message shows, or messages that show media without files."""
    rows = [source.outline(position) for position in range(min(LOOKED_AT, len(source)))]
    able = {*processor.readers, *processor.writers, *processor.renderer.native.modalities}
    shown = {modality for modality, _ in source.shown}
    for modality in MODALITIES:
        is_held = any(is_file(value) for row in rows for value in row.media[modality])
        if modality not in shown:
            problem = _unshown(source, rows, modality, is_held=is_held, is_able=modality in able)
        else:
            problem = "" if is_held else _without_files(source, rows, modality)
        if problem:
            yield f"data: {source.name!r}: {problem}"


def _unshown(source: RowSource, rows: Sequence[Row], modality: str, *, is_held: bool, is_able: bool) -> str:
    """Return where the data may have files of a modality that no message shows, or an empty text."""
    other = _unread_column(rows, modality)
    if is_held:
        return f"column {_column(source, modality)} has files that no message shows: {how_to_show(modality)}"
    if other and is_able:
        return (
            f"column {other!r} has {modality} files that no message shows: set `columns.{modality}s: {other}`; "
            f"{how_to_show(modality)}; if they are not training data, remove the column from the file"
        )
    if (
        is_able
        and not source.takes_markers
        and any(MARKERS[modality] in part.get("text", "") for row in rows for part in _parts(row))
    ):
        return (
            f"texts contain {MARKERS[modality]}, which is read as text: set `media_markers: [{modality}]` and "
            f"`columns.{modality}s` if it stands for a file, or `media_markers: []` if it is text"
        )
    return ""


def _without_files(source: RowSource, rows: Sequence[Row], modality: str) -> str:
    """Return the problem that messages show a modality for which no row has a file, or an empty text."""
    if not any(part["type"] == modality for row in rows for part in _parts(row)):
        return ""
    other = _unread_column(rows, modality)
    hint = f"; column {other!r} has some: set `columns.{modality}s: {other}`" if other else ""
    return f"messages show {modality}, but column {_column(source, modality)} has no file{hint}"


def _column(source: RowSource, modality: str) -> str:
    return f"{getattr(source.columns, f'{modality}s')!r} (columns.{modality}s)"


def _unread_column(rows: Sequence[Row], modality: str) -> str:
    """Return the first column with media that `columns` does not name, or an empty text."""
    return next((name for row in rows for name, value in row.extra.items() if _holds(name, value, modality)), "")


def _holds(name: str, value: Any, modality: str) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds(name, one, modality) for one in value)
    if isinstance(value, dict):
        return any(_holds(modality, value.get(key), modality) for key in ("bytes", "path"))
    if isinstance(value, bytes):
        return modality_of_bytes(value) == modality
    if isinstance(value, str):  # other columns may have file names that are not media of the row
        return modality in name.lower() and PurePath(value).suffix.lower() in _SUFFIXES[modality]
    return modality == "image" and isinstance(value, Image.Image)


def _parts(row: Row) -> list[dict[str, Any]]:
    """Return the parts of a row; none if its messages are malformed, because training skips it."""
    try:
        return [part for message in row.messages for part in content_parts(message)]
    except (TypeError, KeyError, AttributeError, UnicodeEncodeError, UserError):
        return []


# Keys that say nothing about what is trained.
HARMLESS = frozenset(
    {"id", "uuid", "name", "index", "idx", "tool_call_id", "timestamp", "created_at", "detail", "format", "filename"}
)
_MESSAGE = frozenset({*FIELDS, "tool_calls"})
_SHOWN_COLUMNS = 12  # of a note


def unread_notes(sources: Iterable[RowSource], renderer: Renderer, recipe: Recipe) -> list[str]:
    """Return a line for each data set with keys that nothing reads, or with a recognised format."""
    scored = recipe.evaluation is not None and recipe.evaluation.scorer is not None
    known = renderer.reads | HARMLESS
    lines: list[str] = []
    for source in sources:
        said = source.schema.said and f"data {source.name!r}: {source.schema.said}"
        lines += filter(None, (said, _note(source, known, scored)))
    return lines


def _note(source: RowSource, known: frozenset[str], scored: bool) -> str:
    positions = sorted({*range(min(LOOKED_AT, len(source))), *source.first_of_each_kind()})
    outlines = [source.outline(position) for position in positions]
    rows = [row for row in outlines if not row.problem]  # of a row that is skipped, nothing is read
    found: dict[str, list[str]] = {}
    for row in rows:
        for key in sorted(set(_unread(row, known))):
            found.setdefault(key, []).append(row.id)
    keys = [f"{key} ({len(ids)} of {len(rows)} rows, first {ids[0]!r})" for key, ids in found.items()]
    columns = [] if scored else [*dict.fromkeys(key for row in rows for key in row.extra if key not in HARMLESS)]
    if columns:
        shown = ", ".join(map(repr, columns[:_SHOWN_COLUMNS]))
        more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
        keys.append(f"column{'s' * (len(columns) > 1)} {shown}{more}")
    return f"data {source.name!r}: nothing reads {'; '.join(keys)}" if keys else ""


def _unread(row: Row, known: frozenset[str]) -> Iterator[str]:
    """Yield the keys of messages, parts and files that are not known, in words."""
    messages = [message for message in _listed(row.messages) if isinstance(message, dict)]
    parts = [part for message in messages for part in _listed(message.get("content")) if isinstance(part, dict)]
    files = [file for files in row.media.values() for file in files if isinstance(file, dict)]
    for what, dicts, read in (("message", messages, _MESSAGE), ("part", parts, PART), ("file", files, FILE_KEYS)):
        for one in dicts:
            yield from (f"`{key}` of a {what}" for key in one.keys() - read - known if one[key] is not None)


def _listed(value: object) -> Sequence[Message]:
    return value if isinstance(value, list) else []
