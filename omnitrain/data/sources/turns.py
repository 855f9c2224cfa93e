"""Convert conversations of other formats: turns with ``from`` and ``value``, and media markers in texts."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

TURN_FIELDS = (("role", "content"), ("from", "value"))  # of OpenAI; of ShareGPT and LLaVA
MORE_FIELDS = ("tool_calls", "function_call", "reasoning_content")  # further fields of an assistant's message
MARKERS = {"image": "<image>", "audio": "<audio>", "video": "<video>"}

_ROLES = {"human": "user", "gpt": "assistant"}
_MARKER = re.compile("<(" + "|".join(MARKERS) + ")>")


def how_to_show(modality: str) -> str:
    """Return text that explains how a message shows a medium."""
    return (
        f"each file needs a part of type {modality} in a message (or {MARKERS[modality]} in its text, with "
        f"`media_markers: [{modality}]` of the data set)"
    )


def as_messages(turns: Any, *, marked: Collection[str]) -> Any:
    """Convert turns to messages with a role and a content. Anything but a list of turns is returned unchanged.

    Args:
        turns: ``[{"role": ..., "content": ...}, ...]`` or ``[{"from": ..., "value": ...}, ...]``.
        marked: modalities whose markers in texts stand for media; other markers stay text.
    """
    return [_message(turn, marked) for turn in turns] if isinstance(turns, list) else turns


def role_of(speaker: Any) -> Any:
    """Return the role of a ShareGPT speaker (`from`); other names stay as they are."""
    return _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker


def _message(turn: Any, marked: Collection[str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    if turn.get("role") is None and "from" in turn:  # in parquet each turn has the fields of all turns
        rest = {name: value for name, value in turn.items() if name not in ("role", "content", "from", "value")}
        turn = {"role": role_of(turn["from"]), "content": turn.get("value"), **rest}
    content = turn.get("content")
    if isinstance(content, str) and (found := [m for m in _MARKER.finditer(content) if m[1] in marked]):
        turn = turn | {"content": _parts(content, found)}
    return turn


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
