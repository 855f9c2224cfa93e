"""How the records of a data set are read: which columns they have, and how these become one list of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnitrain.data.sources.part_files import is_file, modality_of_type, take_files
from omnitrain.data.sources.turns import FIELDS, MARKERS, SAID, as_messages
from omnitrain.recipe import Columns


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
        """Take the messages out of a record, and return them without files, and the row's files by modality.

        Raises:
            ValueError: the messages or their files cannot be read.
            UserError: see :func:`~omnitrain.data.sources.turns.as_messages`.
        """
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
    """Take the turns before the answer out of a record: earlier ones, and those of the prompt's columns."""
    history = [] if columns.history is None else _earlier(record.pop(columns.history, None), columns.history)
    given = {name: record.pop(name, None) for name in columns.prompts}
    if len(given) == 1 and isinstance(turns := next(iter(given.values())), list):
        return history + [_untrained(turn) for turn in turns]
    texts = [required(value, name) for name, value in given.items() if value is not None or len(given) == 1]
    if given and not texts:
        raise ValueError(f"columns {list(given)} are null, expected a text")
    return history + [{"role": "user", "content": "\n".join(filter(None, texts))}] * bool(given)


def _answers(value: Any, name: str) -> list[Any]:
    """Return the turns of an answer: a text, or messages."""
    return value if isinstance(value, list) else [{"role": "assistant", "content": required(value, name)}]


def _untrained(turn: Any) -> Any:
    """Return a turn of a prompt, which is not trained, whoever speaks."""
    if not isinstance(turn, dict):
        return turn
    return {key: value for key, value in turn.items() if key not in FIELDS["weight"]} | {"weight": 0}


def _earlier(pairs: Any, name: str) -> list[Any]:
    """Return earlier questions and answers, ``[[question, answer], ...]``, as turns."""
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
    lists = (message.get("content") for message in messages if isinstance(message, dict))
    parts = [part for content in lists if isinstance(content, list) for part in content if isinstance(part, dict)]
    shown = {modality_of_type(part.get("type")) for part in parts}
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
