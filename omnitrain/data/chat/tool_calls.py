"""Read tools and tool calls in the formats of OpenAI and HuggingFace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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

    A single call, or the JSON text of calls, is read, too. Arguments as JSON text, the format of OpenAI, become the
    object that HF templates expect.

    Raises:
        ValueError: an entry is not a call, or its arguments are not an object.
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
