"""Read turns of any format as messages: one role, one content, one flag of training, one field of thoughts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from omnitrain.errors import UserError
from omnitrain.recipe.data import CALLS, ROLES

# Field of a message -> its names in OpenAI's and ShareGPT's data and in those of other trainers.
FIELDS = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "weight": ("weight", "loss", "train", "training"),
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
        f"`media_markers: [{modality}]` of the data set)"
    )


def as_messages(turns: Any, *, marked: Collection[str] = (), roles: Mapping[str, str] = NO_ROLES) -> Any:
    """Read turns as messages; see :func:`canonical`. Anything but a list of turns is returned unchanged.

    Args:
        turns: ``[{"role": ..., "content": ...}, ...]`` or ``[{"from": ..., "value": ...}, ...]``.
        marked: modalities whose markers in texts stand for media; other markers stay text.
        roles: see :class:`~omnitrain.recipe.DataSource`.

    Raises:
        ValueError: see :func:`canonical`.
        UserError: a role that is neither known nor in ``roles``.
    """
    return [_message(turn, marked, roles) for turn in turns] if isinstance(turns, list) else turns


def canonical(message: Any) -> Any:
    """Return a message in which each of :data:`FIELDS` has one name and is not null. Other keys stay as they are.

    ``weight`` becomes 0 (not trained) or 1. Anything but a dict is returned unchanged.

    Raises:
        ValueError: names of one field have different values, or a value of a wrong type.
    """
    if not isinstance(message, dict):
        return message
    left = dict(message)
    found = {field: _taken(left, names) for field, names in FIELDS.items()}
    weight, thoughts = found["weight"], found["reasoning_content"]
    if weight is not None:
        found["weight"] = int(weight)
    if not isinstance(thoughts, str | None):
        raise ValueError(f"the thoughts of a message (`reasoning_content`) are {thoughts!r}, expected a text")
    return {field: value for field, value in found.items() if value is not None} | left


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
        message |= {"role": "assistant", "content": None, "tool_calls": content}
    elif isinstance(content, str) and (found := [m for m in _MARKER.finditer(content) if m[1] in marked]):
        message["content"] = _parts(content, found)
    return message


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
