"""Conversations as others write them: turns of ``from`` and ``value``, and media shown by markers in the text."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

TURN_FIELDS = (("role", "content"), ("from", "value"))  # OpenAI's, and ShareGPT's and LLaVA's
MORE_FIELDS = ("tool_calls", "function_call", "reasoning_content")  # what else an assistant's message may say
MARKERS = {"image": "<image>", "audio": "<audio>", "video": "<video>"}

_ROLES = {"human": "user", "gpt": "assistant"}
_MARKER = re.compile("<(" + "|".join(MARKERS) + ")>")


def how_to_show(modality: str) -> str:
    """What a message needs for each medium."""
    return (
        f"each needs a part of type {modality} (or {MARKERS[modality]} in a text, with `media_markers: [{modality}]` "
        "of the data set)"
    )


def as_messages(turns: Any, *, marked: Collection[str]) -> Any:
    """Turns -> messages with a role and a content; what is no list of turns is given back as it is.

    Args:
        turns: ``[{"role": ..., "content": ...}, ...]`` or ``[{"from": ..., "value": ...}, ...]``.
        marked: modalities that texts show by markers; other markers are text.
    """
    return [_message(turn, marked) for turn in turns] if isinstance(turns, list) else turns


def role_of(speaker: Any) -> Any:
    """The role of who ShareGPT's turns are `from`; of others their own name."""
    return _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker


def _message(turn: Any, marked: Collection[str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    if turn.get("role") is None and "from" in turn:  # parquet has the fields of all turns in each of them
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
