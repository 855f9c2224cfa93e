"""Conversations as others write them: turns of ``from`` and ``value``, and media shown by markers in the text."""

from __future__ import annotations

import re
from typing import Any

TURN_FIELDS = (("role", "content"), ("from", "value"))  # OpenAI's, and ShareGPT's and LLaVA's
MARKERS = {"image": "<image>", "audio": "<audio>", "video": "<video>"}

_ROLES = {"human": "user", "gpt": "assistant"}
_MARKER = re.compile("|".join(MARKERS.values()))


def as_messages(turns: Any, *, marked: bool) -> Any:
    """Turns -> messages with a role and a content; what is no list of turns is given back as it is.

    Args:
        turns: ``[{"role": ..., "content": ...}, ...]`` or ``[{"from": ..., "value": ...}, ...]``.
        marked: texts show media by ``<image>``, ``<audio>`` and ``<video>``.
    """
    return [_message(turn, marked) for turn in turns] if isinstance(turns, list) else turns


def _message(turn: Any, marked: bool) -> Any:
    if not isinstance(turn, dict):
        return turn
    if turn.get("role") is None and "from" in turn:  # parquet has the fields of all turns in each of them
        rest = {name: value for name, value in turn.items() if name not in ("role", "content", "from", "value")}
        speaker = turn["from"]
        role = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        turn = {"role": role, "content": turn.get("value"), **rest}
    content = turn.get("content")
    if marked and isinstance(content, str) and _MARKER.search(content):
        turn = turn | {"content": _parts(content)}
    return turn


def _parts(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    end = 0
    for found in _MARKER.finditer(text):
        parts += [_text(text[end : found.start()]), {"type": found[0][1:-1]}]
        end = found.end()
    parts.append(_text(text[end:]))
    return [part for part in parts if part.get("text") != ""]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
