"""Read turns of any format as messages: one role, one content, one flag of training, one field of thoughts."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from omnitrain.errors import UserError
from omnitrain.recipe.data import CALLS, ROLES

# Field of a message -> its names in the data of OpenAI, ShareGPT and other trainers.
FIELDS = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "weight": ("weight", "loss", "train", "training", "loss_scale"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
}
TURN = ("role", "content")
SAID = {*FIELDS["role"], *FIELDS["content"]}
PART = frozenset({"type", "text"})
MARKERS = {"image": "<image>", "audio": "<audio>", "video": "<video>"}
NO_ROLES: Mapping[str, str] = MappingProxyType({})

_MARKER = re.compile("<(" + "|".join(MARKERS) + ")>")


def how_to_show(modality: str) -> str:
    """Return text that explains how a message shows a medium."""
    return (
        f"each file needs a part of type {modality} in a message (or {MARKERS[modality]} in its text, with "
        f"`media_markers: [{modality}]` of the data set, or `format: ms_swift` if its rows are of this format)"
    )


def as_messages(
    turns: Iterable[Any], *, marked: Collection[str] = (), roles: Mapping[str, str] = NO_ROLES
) -> list[Any]:
    """Read turns as messages, and a tool's call as a part of the answer before it; errors as of :func:`canonical`.

    ``marked``: modalities whose markers in texts stand for media. Raises UserError: no such role is in ``roles``.
    """
    messages: list[Any] = []
    for turn in turns:
        message = _message(turn, marked, roles)
        is_call = isinstance(turn, dict) and role_of(turn.get("role") or turn.get("from"), roles) == CALLS
        last = messages[-1] if messages else None
        if is_call and isinstance(last, dict) and last.get("role") == "assistant":
            messages.append(_joined(messages.pop(), message))
        else:
            messages.append(message)
    return messages


def canonical(message: Any) -> Any:
    """Return a message in which each of :data:`FIELDS` has one name and is not null; other values stay as they are.

    ``weight`` becomes 0 (not trained) or 1. Raises ValueError: different values of one field, or of a wrong type.
    """
    if not isinstance(message, dict):
        return message
    left = dict(message)
    found = {field: _taken(left, names) for field, names in FIELDS.items()}
    content, of_parts = _without_flags(found["content"])
    weight, thoughts = _one_flag({found["weight"], of_parts} - {None}), found["reasoning_content"]
    found |= {"content": content, "weight": None if weight is None else int(weight)}
    if not isinstance(thoughts, str | None):
        raise ValueError(f"the thoughts of a message (`reasoning_content`) are {thoughts!r}, expected a text")
    return {field: value for field, value in found.items() if value is not None} | left


def _without_flags(content: Any) -> tuple[Any, Any]:
    """Return the content without the flags of its parts, and the flag of all parts; None: they have none."""
    if not isinstance(content, list):
        return content, None
    parts = [dict(part) if isinstance(part, dict) else part for part in content]
    flags = {_taken(part, FIELDS["weight"]) for part in parts if isinstance(part, dict)}
    return parts, _one_flag({1 if flag is None else flag for flag in flags}) if flags - {None} else None


def _one_flag(flags: Collection[Any]) -> Any:
    if len(flags) > 1:
        raise ValueError(
            "the flags of a message and its parts contradict each other: it is trained as a whole or not at all; "
            "make a message of each part, or drop the row"
        )
    return next(iter(flags), None)


def role_of(speaker: Any, roles: Mapping[str, str] = NO_ROLES) -> Any:
    """Return the role of a speaker; names that nobody knows stay as they are."""
    return {**ROLES, **roles}.get(speaker, speaker) if isinstance(speaker, str) else speaker


def _taken(left: dict[str, Any], names: Collection[str]) -> Any:
    """Take all names of a field out of ``left``, and return their value; None: they are null or not there."""
    given = {name: value for name in names if (value := left.pop(name, None)) is not None}
    for name, value in given.items():
        if "weight" in names and (value not in (0, 1) or isinstance(value, str)):
            raise ValueError(f"{name} {value!r} of a message: expected 0 (not trained) or 1, or false or true")
        if value != next(iter(given.values())):
            raise ValueError(f"a message has {given}, which contradict each other; expected one of them")
    return next(iter(given.values()), None)


def _message(turn: Any, marked: Collection[str], roles: Mapping[str, str]) -> Any:
    message = canonical(turn)
    if not isinstance(message, dict) or "role" not in message:
        return message
    speaker, content = message["role"], message.get("content")
    message["role"] = role_of(speaker, roles)
    if not isinstance(speaker, str) or (speaker not in ROLES and speaker not in roles):
        raise UserError(_unknown(speaker))
    if message["role"] == CALLS:
        message |= {"role": "assistant", "content": None, "tool_calls": _calls(content)}
    elif isinstance(content, str) and (found := [m for m in _MARKER.finditer(content) if m[1] in marked]):
        message["content"] = _parts(content, found)
    return message


def _calls(content: Any) -> Any:
    """Return a call or several as a list; text that is no JSON stays for the one who reads calls to name it."""
    with contextlib.suppress(ValueError):
        content = json.loads(content) if isinstance(content, str) else content
    return content if isinstance(content, list) else [content]


def _joined(message: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    flags = [one.get("weight", 1) for one in (message, call)]
    if flags[0] != flags[1]:
        raise ValueError(
            f"the assistant's text and its call are one message, but their flags are {flags[0]} and {flags[1]}; give "
            "both the same `weight` (also `loss`, `train`, `training`)"
        )
    return call | message | {"tool_calls": [*_calls(message.get("tool_calls") or []), *call["tool_calls"]]}


def _unknown(speaker: Any) -> str:
    known = dict.fromkeys(role for role in ROLES.values() if role != CALLS)
    return (
        f"message role {speaker!r}: expected {', '.join(known)}, or as in other formats "
        f"{', '.join(name for name in ROLES if name not in known)}; `roles: {{{speaker}: user}}` of the data set reads "
        f"it as the user, and `roles: {{{speaker}: {speaker}}}` as a role that the chat template knows"
    )


def _parts(text: str, markers: list[re.Match[str]]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    end = 0
    for found in markers:
        parts += [_text(text[end : found.start()]), {"type": found[1]}]
        end = found.end()
    parts.append(_text(text[end:]))
    return [part for part in parts if part.get("text") != ""]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
