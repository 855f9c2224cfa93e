"""The media of a conversation: which part shows which file, and whether it is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnitrain.data.rows import MODALITIES
from omnitrain.errors import UserError

Message = dict[str, Any]


@dataclass(frozen=True)
class MediaPart:
    """A content part that shows a medium.

    Attributes:
        modality: ``image``, ``audio`` or ``video``.
        position: index among the row's media of this modality.
        is_target: part of an assistant message, so to be written.
    """

    modality: str
    position: int
    is_target: bool


def content_parts(message: Message) -> list[Message]:
    """The content of a message as a list of parts; a string is one text part.

    Raises:
        UserError: a part of a type that is neither text nor a modality.
        TypeError, KeyError: not a message.
        UnicodeEncodeError: half a character, which JSON can spell, and no tokenizer takes.
    """
    content = message["content"]
    if not isinstance(content, (str, list)):
        raise TypeError(f"content {content!r}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if not isinstance(part, dict):
            raise TypeError(f"part {part!r}")
        if part["type"] == "text":
            if not isinstance(part["text"], str):
                raise TypeError(f"text {part['text']!r}")
            part["text"].encode()
        elif part["type"] not in MODALITIES:
            raise UserError(f"content part of type {part['type']!r}: expected text, {', '.join(MODALITIES)}")
    return parts


def media_parts(messages: list[Message]) -> list[MediaPart]:
    """The media parts of a conversation, in order.

    Raises:
        UserError, UnicodeEncodeError: see :func:`content_parts`.
        TypeError, KeyError: not a conversation.
    """
    seen = dict.fromkeys(MODALITIES, 0)
    found: list[MediaPart] = []
    for message in messages:
        is_target = message["role"] == "assistant"
        for modality in (part["type"] for part in content_parts(message) if part["type"] != "text"):
            found.append(MediaPart(modality, seen[modality], is_target))
            seen[modality] += 1
    return found
