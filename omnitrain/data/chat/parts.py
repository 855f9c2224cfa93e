"""The media of a conversation: the file of each media part, and whether the model reads or writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnitrain.data.sources.rows import MODALITIES
from omnitrain.errors import UserError

Message = dict[str, Any]


@dataclass(frozen=True)
class MediaPart:
    """A content part that contains an image, sound or video."""

    modality: str  # image, audio or video
    position: int  # among the data row's media of this modality
    is_target: bool  # it is in an assistant message, so the model learns to write it


def content_parts(message: Message) -> list[Message]:
    """Return the content of a message as a list of parts.

    A string becomes one text part. Null content in a message with tool calls has no parts.

    Raises:
        UserError: a part of a type that is neither text nor a modality.
        TypeError, KeyError: this is not a message.
        UnicodeEncodeError: a lone surrogate, which JSON allows, but no tokenizer takes.
    """
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return []
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
            like = next((m for m in MODALITIES if m in str(part["type"])), None)  # OpenAI's parts contain their file
            hint = f"; write {{type: {like}}} and put the file into the column `{like}s`" if like else ""
            raise UserError(f"content part of type {part['type']!r}: expected text, {', '.join(MODALITIES)}{hint}")
    return parts


def media_parts(messages: list[Message]) -> list[MediaPart]:
    """Return the media parts of a conversation, in order; errors as of :func:`content_parts`."""
    counts = dict.fromkeys(MODALITIES, 0)
    parts: list[MediaPart] = []
    for message in messages:
        is_target = message["role"] == "assistant"
        for modality in (part["type"] for part in content_parts(message) if part["type"] != "text"):
            parts.append(MediaPart(modality, counts[modality], is_target))
            counts[modality] += 1
    return parts


def is_trained(message: Message) -> bool:
    """Whether a message is trained: those of the assistant are, unless their ``weight`` is 0.

    Raises:
        ValueError: a weight that this message cannot have.
    """
    is_assistant = message["role"] == "assistant"
    weight = message.get("weight")
    if weight is None:
        return is_assistant
    if weight and not is_assistant:
        raise ValueError(
            f"weight {weight!r} of a message of role {message['role']!r}: only assistant messages are trained"
        )
    if is_assistant and not weight and (media := [p["type"] for p in content_parts(message) if p["type"] != "text"]):
        raise ValueError(f"weight 0 of a message in which the assistant writes {media}: such media are always trained")
    return is_assistant and bool(weight)
