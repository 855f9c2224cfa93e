"""How the records of a data set are read: which columns they have, and how these become one list of messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from omnitrain.data.sources.part_files import is_file, modality_of_type, take_files
from omnitrain.data.sources.turns import FIELDS, MARKERS, SAID, as_messages
from omnitrain.errors import DataError
from omnitrain.recipe import Columns, DataSource


@dataclass(frozen=True)
class Schema:
    """How records become conversations."""

    columns: Columns = field(default_factory=Columns)
    marked: frozenset[str] = frozenset()  # see as_messages
    roles: Mapping[str, str] = field(default_factory=dict)  # see as_messages
    shows_first: bool = False  # media that no message shows come before the first text of the user
    images_mark_videos: bool = False  # <image> shows the video of a row that has no image, as in LLaVA's data
    said: str = ""  # which format was recognised, and why; empty: none

    @property
    def makes_messages(self) -> bool:
        """Whether messages show media that the column of messages does not show, or are in other columns."""
        return self.columns.response is not None or self.shows_first or self.images_mark_videos

    def conversation(
        self, record: dict[str, Any], media: Mapping[str, Sequence[Any]]
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """Take messages, without files, and files by modality out of a record; ValueError: unreadable."""
        columns = self.columns
        if columns.response is None:
            messages = self._messages(record.pop(columns.messages), media)
        else:
            asked = _questions(record, columns), _answers(record.pop(columns.response), columns.response)
            messages = [message for turns in asked for message in self._messages(turns, media)]
        messages = _after_system(record, columns, messages)
        return take_files(_with_shown(messages, media) if self.shows_first else messages, media)

    def _messages(self, turns: Any, media: Mapping[str, Sequence[Any]]) -> list[Any]:
        if not isinstance(turns, list):
            raise ValueError(f"the messages of the row are {str(turns)[:80]!r}, expected a list of role and content")
        if self.images_mark_videos and any(map(is_file, media["video"])) and not any(map(is_file, media["image"])):
            turns = [_with_video_markers(turn) for turn in turns]
        return as_messages(turns, marked=self.marked, roles=self.roles)


def required(text: Any, name: str | None) -> str:
    """Return the text of a column; ValueError: it is no text."""
    if not isinstance(text, str):
        raise ValueError(f"column {name!r} has {'no value' if text is None else repr(text)}, expected a text")
    return text


def _questions(record: dict[str, Any], columns: Columns) -> list[Any]:
    """Take the turns before the answer out of a record: earlier turns, and the turns of the prompt's columns."""
    history = [] if columns.history is None else _earlier(record.pop(columns.history, None), columns.history)
    given = {name: record.pop(name, None) for name in columns.prompts}
    if len(given) == 1 and isinstance(turns := next(iter(given.values())), list):
        return history + [_untrained(turn) for turn in turns]
    texts = [required(value, name) for name, value in given.items() if value is not None or len(given) == 1]
    if given and not texts:
        raise ValueError(f"columns {list(given)} are null, expected a text")
    return history + [{"role": "user", "content": "\n".join(filter(None, texts))}] * bool(given)


def _answers(value: Any, name: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": "assistant", "content": required(value, name)}]


def _untrained(turn: Any) -> Any:
    """Return a turn of a prompt, which is not trained, whoever speaks."""
    if not isinstance(turn, dict):
        return turn
    return {key: value for key, value in turn.items() if key not in FIELDS["weight"]} | {"weight": 0}


def _earlier(pairs: Any, name: str) -> list[Any]:
    pairs = pairs or []
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"column {name!r} has {str(pairs)[:80]!r}, expected pairs of texts: [[question, answer], ...]")
    speakers = ("user", "assistant")
    return [
        {"role": role, "content": required(text, name)}
        for pair in pairs
        for role, text in zip(speakers, pair, strict=True)
    ]


def _after_system(record: dict[str, Any], columns: Columns, messages: list[Any]) -> list[Any]:
    """Return messages that begin with the text of the system column, if it has one."""
    text = columns.system and record.pop(columns.system, None)
    if text is None or text == "":
        return messages
    system = {"role": "system", "content": required(text, columns.system)}
    if not messages or not isinstance(messages[0], dict) or messages[0].get("role") != "system":
        return [system, *messages]
    if messages[0].get("content") != text:
        raise ValueError(f"column {columns.system!r} and the first message are two system texts; remove one of them")
    return messages


def _with_video_markers(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    texts = {key: value for key, value in turn.items() if key in SAID and isinstance(value, str)}
    return turn | {key: text.replace(MARKERS["image"], MARKERS["video"]) for key, text in texts.items()}


def _with_shown(messages: list[Any], media: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return messages with the media of each modality that none of them shows, before the user's first text."""
    dicts = [message for message in messages if isinstance(message, dict)]
    lists = [content for message in dicts if isinstance(content := message.get("content"), list)]
    shown = {modality_of_type(part.get("type")) for part in chain(*lists) if isinstance(part, dict)}
    new = [{"type": m} for m in MARKERS if m not in shown for _ in filter(is_file, media[m])]
    if not new:
        return messages
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "user" not in roles:
        begin = roles.count("system")
        return [*messages[:begin], {"role": "user", "content": new}, *messages[begin:]]
    begin = roles.index("user")
    content = messages[begin].get("content")
    said = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return [*messages[:begin], messages[begin] | {"content": new + said}, *messages[begin + 1 :]]


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
    """Return how rows with the columns ``found`` are read; DataError: not of the format, or a useless column."""
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
    shapes = [one for one in FORMATS[name].shapes if all(_named(one, own, key)[0] in found for key in one.needs)]
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


def _unused(shape: Shape, own: Mapping[str, Any]) -> set[str]:
    return own.keys() - shape.needs.keys() - shape.may.keys() - _EVERY


def _named(shape: Shape, own: Mapping[str, Any], key: str) -> list[str]:
    names = own.get(key, shape.needs[key])
    return [names] if isinstance(names, str) else list(names)


def _words(shape: Shape, own: Mapping[str, Any]) -> str:
    return " and ".join(repr(_named(shape, own, key)[0]) for key in shape.needs)
