"""Rows as the formats publish them: ``ROWS[format][what the row shows]``."""

from __future__ import annotations

import json
from typing import Any

CALL = {"name": "weather", "arguments": {"place": "Paris"}}
OTHER_CALL = {"name": "weather", "arguments": {"place": "Rome"}}
_TOOL = {
    "name": "weather",
    "description": "Weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": _TOOL}]
THOUGHTS = "<think>\ntwo and two\n</think>\n\n4"


def _openai_calls(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{n}", "type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}}
        for n, call in enumerate(calls, 1)
    ]


def _said(*turns: tuple[str, Any], names: tuple[str, str] = ("role", "content")) -> list[dict[str, Any]]:
    return [dict(zip(names, turn, strict=True)) for turn in turns]


def _sharegpt(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return _said(*turns, names=("from", "value"))


_ASKED_TWICE = [("user", "hi"), ("assistant", "hello"), ("user", "2+2?"), ("assistant", "4")]
_CHAT = [("human", "hi"), ("gpt", "hello"), ("human", "2+2?"), ("gpt", "4")]
_IMAGES = {"type": "image_url", "image_url": {"url": "cat.png"}}
_ASKS_TOOL = {"role": "user", "content": "Weather in Paris?"}

ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "alpaca": {
        "input": {"instruction": "Translate.", "input": "good day", "output": "bonjour"},
        "no input": {"instruction": "Say hello.", "input": "", "output": "hello"},
        "system": {"instruction": "2+2?", "input": "", "output": "4", "system": "Be short."},
        "history": {"instruction": "3+3?", "output": "6", "history": [["hi", "hello"], ["2+2?", "4"]]},
        "media": {"instruction": "<image>What is it?", "input": "", "output": "A cat.", "images": ["cat.png"]},
        "tools": {"instruction": "Weather?", "output": "Where?", "tools": json.dumps([_TOOL])},
        "thoughts": {"instruction": "2+2?", "input": "", "output": THOUGHTS},
    },
    "sharegpt": {
        "history": {"conversations": _sharegpt(*_CHAT)},
        "system": {"conversations": _sharegpt(("system", "Be short."), *_CHAT)},
        "system column": {"conversations": _sharegpt(*_CHAT[2:]), "system": "Be short."},
        "bot": {"conversations": _sharegpt(("user", "2+2?"), ("bot", "4"))},
        "masks": {
            "conversations": [
                _sharegpt(*_CHAT)[0],
                {"from": "gpt", "value": "hello", "loss": False},
                *_sharegpt(*_CHAT[2:]),
            ]
        },
        "tools": {
            "conversations": _sharegpt(
                ("human", "Weather in Paris?"),
                ("function_call", json.dumps(CALL)),
                ("observation", "rain"),
                ("gpt", "It rains."),
            ),
            "tools": json.dumps([_TOOL]),
        },
        "media": {"conversations": _sharegpt(("human", "<image>What?"), ("gpt", "A cat.")), "images": ["cat.png"]},
        "thoughts": {"conversations": _sharegpt(("human", "2+2?"), ("gpt", THOUGHTS))},
    },
    "llama_factory": {
        "system": {"conversations": _sharegpt(*_CHAT), "system": "Be short."},
        "history": {"instruction": "3+3?", "input": "", "output": "6", "history": [["2+2?", "4"]]},
        "messages": {"messages": _said(("system", "Be short."), *_ASKED_TWICE)},
        "tools": {
            "conversations": _sharegpt(
                ("human", "Weather in Paris and Rome?"),
                ("function_call", json.dumps([CALL, OTHER_CALL])),
                ("observation", "rain, sun"),
                ("gpt", "Rain and sun."),
            ),
            "tools": json.dumps([_TOOL]),
        },
        "media": {
            "messages": _said(
                ("user", "<image><image>Which?"),
                ("assistant", "The first."),
                ("user", "And <video>?"),
                ("assistant", "A cat."),
            ),
            "images": ["cat.png", "dog.png"],
            "videos": ["cat.webp"],
        },
        "image of a tool": {
            "conversations": _sharegpt(
                ("human", "Weather in Paris?"),
                ("function_call", json.dumps(CALL)),
                ("observation", "<image>"),
                ("gpt", "It rains."),
            ),
            "images": ["cat.png"],
        },
        "thoughts": {"conversations": _sharegpt(("human", "2+2?"), ("gpt", THOUGHTS))},
    },
    "ms_swift": {
        "history": {"query": "3+3?", "response": "6", "history": [["2+2?", "4"]], "system": "Be short."},
        "system": {"messages": _said(("system", "Be short."), *_ASKED_TWICE)},
        "masks": {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello", "loss": False},
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4", "loss": True},
            ]
        },
        "tools": {
            "messages": _said(
                ("user", "Weather in Paris and Rome?"),
                ("tool_call", json.dumps(CALL)),
                ("tool_call", json.dumps(OTHER_CALL)),
                ("tool_response", "rain"),
                ("tool_response", "sun"),
                ("assistant", "Rain and sun."),
            ),
            "tools": json.dumps(TOOLS),
        },
        "loss scale": {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello", "loss_scale": 0.0},
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4", "loss_scale": 1.0},
            ]
        },
        "text and call": {
            "messages": _said(
                ("user", "Weather in Paris?"),
                ("assistant", "I look."),
                ("tool_call", json.dumps(CALL)),
                ("tool", "rain"),
                ("assistant", "It rains."),
            ),
            "tools": TOOLS,
        },
        "media": {
            "messages": _said(("user", "<image><video>Which?"), ("assistant", "The first.")),
            "images": ["cat.png"],
            "videos": ["cat.webp"],
        },
        "image of a tool": {
            "messages": _said(
                ("user", "Weather in Paris?"),
                ("tool_call", json.dumps(CALL)),
                ("tool_response", "<image>"),
                ("assistant", "It rains."),
            ),
            "images": ["cat.png"],
        },
        "thoughts": {"messages": _said(("user", "2+2?"), ("assistant", THOUGHTS))},
    },
    "axolotl": {
        "history": {"messages": _said(*_ASKED_TWICE)},
        "system": {"messages": _said(("system", "Be short."), *_ASKED_TWICE)},
        "turns": {"conversations": _sharegpt(("system", "Be short."), *_CHAT)},
        "masks": {
            "messages": [
                {"role": "user", "content": "hi", "training": False},
                {"role": "assistant", "content": "hello", "training": False},
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4", "training": True},
            ]
        },
        "tools": {
            "messages": [
                _ASKS_TOOL,
                {"role": "assistant", "content": "I look.", "tool_calls": _openai_calls(CALL)},
                {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "rain"},
                {"role": "assistant", "content": "It rains."},
            ],
            "tools": TOOLS,
        },
        "media": {
            "messages": [
                {"role": "user", "content": [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
            ]
        },
        "thoughts": {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "reasoning_content": "two and two", "content": "4"},
            ]
        },
    },
    "openai": {
        "history": {"messages": _said(*_ASKED_TWICE)},
        "system": {"messages": _said(("system", "Be short."), *_ASKED_TWICE)},
        "developer": {"messages": _said(("developer", "Be short."), *_ASKED_TWICE)},
        "masks": {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello", "weight": 0},
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4", "weight": 1},
            ]
        },
        "tools": {
            "messages": [
                _ASKS_TOOL,
                {"role": "assistant", "content": None, "tool_calls": _openai_calls(CALL, OTHER_CALL)},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
                {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
                {"role": "assistant", "content": "It rains."},
            ],
            "tools": TOOLS,
            "parallel_tool_calls": True,
        },
        "media": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What?"}, _IMAGES]},
                {"role": "assistant", "content": "A cat."},
            ]
        },
        "image of a tool": {
            "messages": [
                _ASKS_TOOL,
                {"role": "assistant", "tool_calls": _openai_calls(CALL)},
                {"role": "tool", "tool_call_id": "call_1", "content": [_IMAGES]},
                {"role": "assistant", "content": "It rains."},
            ],
            "tools": TOOLS,
        },
        "thoughts": {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "reasoning_content": "two and two", "content": "4"},
            ]
        },
    },
    "trl": {
        "history": {"messages": _said(*_ASKED_TWICE)},
        "system": {"messages": _said(("system", "Be short."), *_ASKED_TWICE)},
        "completion": {"prompt": _said(("user", "2+2?")), "completion": _said(("assistant", "4"))},
        "masks": {
            "prompt": _said(*_ASKED_TWICE[:3]),
            "completion": _said(*_ASKED_TWICE[3:]),
        },
        "tools": {
            "messages": [
                _ASKS_TOOL,
                {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "name": "weather", "content": "rain"},
                {"role": "assistant", "content": "It rains."},
            ],
            "tools": TOOLS,
        },
        "media": {"messages": _said(*_ASKED_TWICE), "images": ["cat.png", "dog.png"]},
        "media of a completion": {
            "prompt": _said(("system", "Be short."), ("user", "What?")),
            "completion": _said(("assistant", "A cat.")),
            "image": "cat.png",
        },
        "thoughts": {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "reasoning_content": "two and two", "content": "4"},
            ]
        },
    },
    "llava": {
        "media": {
            "id": "000000033471",
            "image": "cat.png",
            "conversations": _sharegpt(("human", "<image>\nWhat is it?"), ("gpt", "A cat.")),
        },
        "history": {
            "id": "1",
            "image": "cat.png",
            "conversations": _sharegpt(("human", "What is it?\n<image>"), ("gpt", "A cat."), *_CHAT[2:]),
        },
        "no media": {"id": "2", "conversations": _sharegpt(*_CHAT)},
        "two images": {
            "id": "3",
            "image": ["cat.png", "dog.png"],
            "conversations": _sharegpt(("human", "<image><image>\nWhich?"), ("gpt", "The first.")),
        },
        "video": {
            "id": "4",
            "video": "cat.webp",
            "conversations": _sharegpt(("human", "<image>\nWhat is it?"), ("gpt", "A cat.")),
        },
        "video marker": {
            "id": "5",
            "video": "cat.webp",
            "conversations": _sharegpt(("human", "<video>\nWhat is it?"), ("gpt", "A cat.")),
        },
        "system": {"id": "6", "conversations": _sharegpt(("system", "Be short."), *_CHAT)},
        "thoughts": {"id": "7", "conversations": _sharegpt(("human", "2+2?"), ("gpt", THOUGHTS))},
    },
}

SHOWN_BY_TRL = ("media", "image of a tool")  # of OpenAI's rows; axolotl reads the others

# Rows that no package reads -> a row of the same format that means the same, by the format's own documentation.
DOCUMENTED = {
    # The rows of LLaVA-Video-178K have `video`, and `<image>` in the text (its card on the Hub; LLaVA-NeXT's train.py).
    ("llava", "video"): "video marker",
}
