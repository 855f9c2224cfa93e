"""The media of a conversation: the file of each media part, and whether the model reads or writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnitrain.data.sources.rows import MODALITIES
from omnitrain.errors import UserError

Message = dict[str, Any]
_DOES = {False: "reads", True: "writes"}


@dataclass(frozen=True)
class MediaPart:
    """A content part that contains an image, sound or video."""

    modality: str  # image, audio or video
    position: int  # among the data row's media of this modality
    is_target: bool  # it is in an assistant message, so the model learns to write it
    components: tuple[str, ...] | None = None  # those that read or write it; None: the part names none


def content_parts(message: Message) -> list[Message]:
    """Return the content of a message as a list of parts.

    A string becomes one text part. Null content in a message with tool calls has no parts. Raises UserError: a part of
    a type that is neither text nor a modality; TypeError, KeyError: this is not a message; UnicodeEncodeError: a lone
    surrogate, which JSON allows, but no tokenizer takes.
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
        for part in content_parts(message):
            if (modality := part["type"]) != "text":
                parts.append(MediaPart(modality, counts[modality], is_target, _components(part, is_target)))
                counts[modality] += 1
    return parts


def _components(part: Message, is_target: bool) -> tuple[str, ...] | None:
    """Return the names that a part has under its key ``encoders``; a part to write has them under ``decoders``."""
    key, other = ("decoders", "encoders") if is_target else ("encoders", "decoders")
    if part.get(other):
        raise UserError(f"`{other}` of a part of {part['type']} that the model {_DOES[is_target]}: expected `{key}`")
    names = part.get(key)
    if names is None:
        return None
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(one, str) for one in names):
        raise UserError(f"`{key}` of a part of {part['type']}: found {_shown(names)}; expected a list of names")
    return tuple(names)


def is_trained(message: Message) -> bool:
    """Whether a message is trained: an assistant's, unless its ``weight`` is 0; ValueError: a wrong weight."""
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


def tools_of(column: Any) -> list[dict[str, Any]]:
    """Return the tools of a row, from a list of objects or the JSON text of such a list; else raise ValueError."""
    tools = _parsed(column, "tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and name_of(tool) for tool in tools):
        raise ValueError(
            f"tools: found {_shown(column)}; expected a list of objects with a `function` and its `name`, or the JSON "
            "text of such a list (columns.tools)"
        )
    return tools


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message: ``{"type": "function", "function": {"name": ..., "arguments": {...}}, ...}``.

    A single call, and JSON text of calls or arguments, is read, too. Raises ValueError: an entry is no such call.
    """
    if message.get("function_call"):
        raise ValueError("function_call: OpenAI replaced it by `tool_calls`; use that")
    calls = _parsed(message.get("tool_calls"), "tool_calls") or []
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls: found {_shown(calls)}; expected a list of objects with a `function`")
    return [_call(call, f"tool_calls[{position}]") for position, call in enumerate(calls)]


def name_of(called: Mapping[str, Any]) -> str:
    """Return the function name of a tool or a call; empty if it has none."""
    name = _function(called).get("name")
    return name if isinstance(name, str) else ""


def with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of :func:`calls_of` with its arguments as JSON text."""
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not name_of(call):
        raise ValueError(f"{where}: found {_shown(call)}; expected an object with a `function` and its `name`")
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # dates in parquet; lone surrogates, which JSON allows
        raise ValueError(f"{where}: cannot be written as JSON: {error}") from None
    function = _function(call)
    arguments = _parsed(function.get("arguments"), f"{where}.function.arguments")
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{where}.function.arguments: found {_shown(arguments)}; expected an object")
    others = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    return others | {"type": "function", "function": {**function, "arguments": arguments or {}}}


def _function(called: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"name": ..., ...}``, with or without the outer ``{"function": {...}}``."""
    function = called.get("function", {name: called[name] for name in ("name", "arguments") if name in called})
    return function if isinstance(function, dict) else {}


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found {_shown(value)}, which is not valid JSON: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
