"""The formats of rows by their names: which columns they have, and what marks media in their texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnitrain.data.sources.schema import Schema
from omnitrain.data.sources.turns import MARKERS
from omnitrain.errors import DataError
from omnitrain.recipe import Columns, DataSource

_EVERY = {"id", "source", "system", "tools", *(f"{modality}s" for modality in MARKERS)}  # fields of every format


@dataclass(frozen=True)
class Shape:
    """Columns that rows of a format have: fields of :class:`Columns` -> names."""

    needs: Mapping[str, Any]  # of several columns of a field, the first must be there
    may: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """What rows of a format have, apart from what messages of any format may have."""

    shapes: tuple[Shape, ...]  # its kinds of rows; a data set has one of them, the first whose columns are there
    marks: bool = False  # <image>, <audio> and <video> in texts show media
    shows_first: bool = False  # see Schema
    images_mark_videos: bool = False


_MESSAGES, _CONVERSATIONS = Shape({"messages": "messages"}), Shape({"messages": "conversations"})
_ALPACA = Shape({"prompt": ["instruction", "input"], "response": "output"}, {"history": "history"})
_QUERY = Shape({"prompt": "query", "response": "response"}, {"history": "history"})
_COMPLETION = Shape({"prompt": "prompt", "response": "completion"})

FORMATS = {
    "alpaca": Format((_ALPACA,), marks=True),
    "sharegpt": Format((_CONVERSATIONS,), marks=True),
    "llama_factory": Format((_CONVERSATIONS, _MESSAGES, _ALPACA), marks=True),
    "ms_swift": Format((_MESSAGES, _CONVERSATIONS, _QUERY, _ALPACA), marks=True, shows_first=True),
    "axolotl": Format((_MESSAGES, _CONVERSATIONS)),
    "openai": Format((_MESSAGES,)),
    "trl": Format((_MESSAGES, _COMPLETION), shows_first=True),
    "llava": Format((_CONVERSATIONS,), marks=True, images_mark_videos=True),
}
# Formats that are recognised, in this order, and the columns that only their rows have.
_RECOGNISED = (
    ("llava", ("conversations", "image")),
    ("llava", ("conversations", "video")),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("trl", ("prompt", "completion")),
    ("ms_swift", ("query", "response")),
)


def schema_of(source: DataSource, found: Sequence[str]) -> Schema:
    """Return how the rows of a data set with the columns ``found`` are read; no columns: nothing is known.

    Raises:
        DataError: the rows are not of the format that the recipe names, or `columns` has one that it does not use.
    """
    own = {name: value for name, value in source.columns if value != Columns.model_fields[name].default}
    name: str | None = source.format
    said = ""
    if name is None and source.columns.messages not in found and not own.keys() & {"messages", "response", "text"}:
        name, said = _recognised(found)
    if name is None or not found:
        shows_first = source.columns.response is not None
        return Schema(source.columns, frozenset(source.media_markers or ()), source.roles, shows_first=shows_first)
    try:
        columns = _columns(name, own, found)
    except ValueError as error:
        raise DataError(f"data: {source.path!r}: {error}") from None
    return _schema(FORMATS[name], columns, source, found, said)


def _schema(format: Format, columns: Columns, source: DataSource, found: Collection[str], said: str) -> Schema:
    marked = [m for m in MARKERS if format.marks and getattr(columns, f"{m}s") in found]
    return Schema(
        columns,
        frozenset(marked if source.media_markers is None else source.media_markers),
        source.roles,
        shows_first=format.shows_first or columns.response is not None,
        images_mark_videos=format.images_mark_videos,
        said=said,
    )


def _fitting(found: set[str]) -> dict[str, set[str]]:
    """Return the formats whose rows have such columns, in the order of preference, and these columns."""
    fit: dict[str, set[str]] = {}
    for name, columns in _RECOGNISED:
        if found >= set(columns):
            fit.setdefault(name, set(columns))
    return fit


def _recognised(found: Collection[str]) -> tuple[str | None, str]:
    """Return the format of rows with these columns, and in words why it is; None: it is not known."""
    fit = _fitting(set(found))
    if not fit:
        return None, ""
    chosen, columns = next(iter(fit.items()))
    others = [f"`{name}`" for name, its in fit.items() if not its <= columns]
    also = f"; {' and '.join(others)} would fit, too, so set `format` if that is meant" if others else ""
    why = " and ".join(f"`{column}`" for column in sorted(columns))
    return chosen, f"read as `format: {chosen}`, because its rows have {why}{also}"


def _columns(name: str, own: Mapping[str, Any], found: Collection[str]) -> Columns:
    """Return the columns of the shape of a format that a data set has, under the recipe's names, or ValueError."""
    shapes = [shape for shape in FORMATS[name].shapes if _has(shape, own, found)]
    if not shapes:
        expected = " or ".join(_words(shape, own) for shape in FORMATS[name].shapes)
        others = [one for one in _fitting(set(found)) if one != name]
        hint = f"; such rows are of `format: {others[0]}`" if others else "; `columns` may rename them"
        raise ValueError(f"format: {name!r} reads {expected}; found the columns {list(found)}{hint}")
    shape = min(shapes, key=lambda one: len(_unused(one, own)))
    if unused := _unused(shape, own):
        key = min(unused)
        raise ValueError(
            f"columns.{key}: found {own[key]!r}, but `format: {name}` reads {_words(shape, own)} and does not use "
            f"`columns.{key}`; remove it, or remove `format`"
        )
    singular = {f"{m}s": m for m in MARKERS if f"{m}s" not in found and m in found}
    return Columns(**{**singular, **shape.may, **shape.needs, **own})


def _has(shape: Shape, own: Mapping[str, Any], found: Collection[str]) -> bool:
    return all(_named(shape, own, key)[0] in found for key in shape.needs)


def _unused(shape: Shape, own: Mapping[str, Any]) -> set[str]:
    return own.keys() - shape.needs.keys() - shape.may.keys() - _EVERY


def _named(shape: Shape, own: Mapping[str, Any], key: str) -> list[str]:
    names = own.get(key, shape.needs[key])
    return [names] if isinstance(names, str) else list(names)


def _words(shape: Shape, own: Mapping[str, Any]) -> str:
    return " and ".join(repr(_named(shape, own, key)[0]) for key in shape.needs)
