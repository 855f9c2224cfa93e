"""Say which keys of rows, messages, parts and files nothing reads.

The keys of all messages are known (:meth:`RowSource.first_of_each_kind`); their rows are looked at, and the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from omnitrain.data.chat.parts import Message
from omnitrain.data.render.renderer import Renderer
from omnitrain.data.render.unread_media import LOOKED_AT
from omnitrain.data.sources.part_files import FILE_KEYS
from omnitrain.data.sources.rows import Row, RowSource
from omnitrain.data.sources.turns import FIELDS, PART
from omnitrain.recipe import Recipe

# Keys that say nothing about what is trained.
HARMLESS = frozenset(
    {"id", "uuid", "name", "index", "idx", "tool_call_id", "timestamp", "created_at", "detail", "format", "filename"}
)
_MESSAGE = frozenset({*FIELDS, "tool_calls"})
_SHOWN_COLUMNS = 12  # of a note


def unread_notes(sources: Iterable[RowSource], renderer: Renderer, recipe: Recipe) -> list[str]:
    """Return a line for each data set with keys that nothing reads, and for each whose format was recognised.

    The chat format may read further keys, and a scorer of the recipe all columns.

    Raises:
        UserError: see :meth:`RowSource.__getitem__`.
    """
    scored = recipe.evaluation is not None and recipe.evaluation.scorer is not None
    known = renderer.reads | HARMLESS
    return [line for source in sources for line in (_recognised(source), _note(source, known, scored)) if line]


def _recognised(source: RowSource) -> str:
    return f"data {source.name!r}: {source.schema.said}" if source.schema.said else ""


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
