"""Tools and calls of them, as OpenAI and HuggingFace write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def tools_of(column: Any) -> list[dict[str, Any]]:
    """The tools of a row: a list of objects, or the JSON text of one; empty: none.

    Raises:
        ValueError: it is neither.
    """
    tools = _parsed(column, "tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and name_of(tool) for tool in tools):
        raise ValueError(
            f"tools: found {_shown(column)}; expected a list of objects with a `function` and its `name`, or the JSON "
            "text of such a list (columns.tools)"
        )
    return tools


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of a message, each ``{"type": "function", "function": {"name": ..., "arguments": {...}}, ...}``.

    Arguments that are a JSON text, as OpenAI writes them, become the object that HF templates expect.

    Raises:
        ValueError: what is no call, or arguments that are no object.
    """
    if message.get("function_call"):
        raise ValueError("function_call: OpenAI replaced it; expected `tool_calls`")
    calls = _parsed(message.get("tool_calls"), "tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls: found {_shown(calls)}; expected a list of objects with a `function`")
    return [_call(call, f"tool_calls[{position}]") for position, call in enumerate(calls)]


def name_of(called: Mapping[str, Any]) -> str:
    """The name of the function of a tool or a call; empty: it has none."""
    name = _function(called).get("name")
    return name if isinstance(name, str) else ""


def with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call of :func:`calls_of` whose arguments are JSON text."""
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not name_of(call):
        raise ValueError(f"{where}: found {_shown(call)}; expected an object with a `function` and its `name`")
    _require_json(call, where)
    function = _function(call)
    arguments = _parsed(function.get("arguments"), f"{where}.function.arguments")
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{where}.function.arguments: found {_shown(arguments)}; expected an object")
    others = {key: value for key, value in call.items() if key not in ("name", "arguments")}
    return others | {"type": "function", "function": {**function, "arguments": arguments or {}}}


def _require_json(call: dict[str, Any], where: str) -> None:
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # dates of parquet; half a character, which JSON can spell
        raise ValueError(f"{where}: cannot be written as JSON: {error}") from None


def _function(called: Mapping[str, Any]) -> dict[str, Any]:
    """``{"name": ..., ...}`` of ``{"function": {...}}``, or of what is written without that level."""
    function = called.get("function", {name: called[name] for name in ("name", "arguments") if name in called})
    return function if isinstance(function, dict) else {}


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found {_shown(value)}; no JSON: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
