# ruff: noqa: RUF001
"""Random conversations, and what their tokens, loss masks and media must be, found without omnitrain's renderers.

The reference renders a conversation with transformers, with marks in place of texts that spell control tokens, and of
media. It finds the assistant's turns by the tokens of the format, and then puts texts and media in place of the marks.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.sources.rows import Row
from tests.tiny import part, png, wav, webp

WORDS = [
    "a",
    "two words",
    "é 漢字",
    "🙂👩🏽‍🚀",
    "\n\n",
    " lead",
    "trail \n",
    'say "x"',
    "{{ x }} {% raw %}",
    "\t",
    "İ",
    "0.5",
]
SPELLED = [
    "<|im_end|>\n<|im_start|>assistant\nno",
    *("</s>", "[INST] x [/INST]", "<｜Assistant｜>x<｜end▁of▁sentence｜>", "<|eot_id|>", "<|image|>", "<|end|>"),
    *("<end_of_turn>\n<start_of_turn>model\nx", "<|start_header_id|>assistant<|end_header_id|>\n\nx", "<|audio|>"),
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Of {name}.", "parameters": {"type": "object"}}}
    for name in ("weather", "clock")
]
ARGUMENTS = [{}, {"place": "Paris", "days": 2}, {"zone": 'é "CET"'}, {"deep": {"list": [1, None, True]}}]
FILES = 6  # different files of each modality


@functools.cache
def file(modality: str, number: int) -> bytes:
    """An image, a sound or a video; their sizes differ."""
    if modality == "image":
        return png(number, 9 + 5 * (number % 4))
    return wav(number, 0.4 + 0.2 * number) if modality == "audio" else webp(number, 3 + number % 4)


@dataclass
class Fuzzer:
    """Makes random conversations.

    Attributes:
        draw: the random numbers.
        reads: modalities of media in messages of users and tools.
        writes: modalities of media in messages of the assistant.
        spells: whether texts may spell control tokens.
        tools: whether the assistant calls tools.
        system: whether a conversation may begin with a system message.
    """

    draw: random.Random
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    spells: bool = True
    tools: bool = True
    system: bool = True

    def row(self, number: int) -> Row:
        """A conversation of one to four questions; its last message may be anybody's."""
        messages = [{"role": "system", "content": self._text()}] if self.system and self.draw.random() < 0.4 else []
        for _ in range(self.draw.randint(1, 4)):
            asked = self.draw.choice(["", " \n", []]) if self.draw.random() < 0.05 else self._content(self.reads)
            messages.append({"role": "user", "content": asked})
            messages += self._answer()
        if self.draw.random() < 0.1:
            messages += copy.deepcopy([m for m in messages if m["role"] in ("user", "assistant")][:1])  # asked again
        if self.draw.random() < 0.1 and len(messages) > 2:
            messages.pop()
        if self.draw.random() < 0.3:  # as in parquet, where each message has the fields of all messages
            messages = [dict.fromkeys(("tool_calls", "name", "tool_call_id", "weight")) | m for m in messages]
        shown = Counter(p["type"] for m in messages for p in parts_of(m) if p["type"] != "text")
        media = {m: [file(m, self.draw.randrange(FILES)) for _ in range(n)] for m, n in shown.items()}
        nothing = self.draw.choice([{}, {"image": []}, {"audio": [None], "video": [{"bytes": None, "path": None}]}])
        tools = self.draw.choice([TOOLS, json.dumps(TOOLS)]) if self.tools else None
        return Row(f"row {number}", "fuzz", messages, nothing | media, {}, tools)

    def _answer(self) -> Iterator[dict[str, Any]]:
        while self.tools and self.draw.random() < 0.3:
            calls = [self._call(position) for position in range(self.draw.randint(1, 3))]
            says = self.draw.choice([None, None, "", [], self._text(), [part("text", self._text())]])
            yield self._weighted({"role": "assistant", "content": says, "tool_calls": [one for one, _, _ in calls]})
            for _, name, identity in calls:
                told = self.draw.choice(["", self._text(spells=False)])
                content = told if self.draw.random() < 0.8 else [part("text", told), *self._media(self.reads, 1)]
                yield {"role": "tool", "name": name, "tool_call_id": identity, "content": content}
        said = self.draw.choice(["", " \n", []]) if self.draw.random() < 0.05 else self._content(self.writes)
        yield self._weighted({"role": "assistant", "content": said})

    def _call(self, position: int) -> tuple[dict[str, Any], str, str]:
        """A call, the name of its function, and its id."""
        name, identity = self.draw.choice(TOOLS)["function"]["name"], f"call{self.draw.randrange(10_000):04}{position}"
        arguments = self.draw.choice(ARGUMENTS)
        given = self.draw.choice([arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)])
        function = {"name": name, "arguments": given if arguments else self.draw.choice([given, None, ""])}
        if self.draw.random() < 0.2:
            return {"id": identity, **function}, name, identity
        return {"id": identity, "type": "function", "function": function}, name, identity

    def _weighted(self, message: dict[str, Any]) -> dict[str, Any]:
        writes = any(p["type"] != "text" for p in parts_of(message))
        weight = self.draw.choice([None, None, 1, True] if writes else [None, None, None, 1, 0, False])
        return message if weight is None and self.draw.random() < 0.8 else message | {"weight": weight}

    def _text(self, *, spells: bool = True) -> str:
        words = [self.draw.choice(WORDS) for _ in range(self.draw.randint(1, 4))]
        if spells and self.spells and self.draw.random() < 0.3:
            words.insert(self.draw.randint(0, len(words)), self.draw.choice(SPELLED))
        text = " ".join(words)
        return text if text.strip() else text + "x"

    def _media(self, modalities: tuple[str, ...], most: int) -> list[dict[str, Any]]:
        return [part(self.draw.choice(modalities)) for _ in range(self.draw.randint(0, most) if modalities else 0)]

    def _content(self, modalities: tuple[str, ...]) -> str | list[dict[str, Any]]:
        if self.draw.random() < 0.4:
            return self._text()
        parts = [part("text", self._text()) for _ in range(self.draw.randint(1, 2))] + self._media(modalities, 3)
        self.draw.shuffle(parts)
        return parts


@dataclass
class Expected:
    """What a sample must have.

    Attributes:
        ids: token ids.
        mask: which of them are trained text.
        media: tokens of each medium, in the order of the text.
        files: modality, file and whether the assistant writes it, of each medium.
    """

    ids: list[int]
    mask: np.ndarray
    media: list[list[int]]
    files: list[tuple[str, bytes, bool]]


MARK = re.compile("\ue000(\\d+)\ue001|\ue002")


def parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message whose content is a list."""
    return message["content"] if isinstance(message["content"], list) else []


class Marks:
    """Texts that spell control tokens, and media, each with a mark that no template changes; equal texts have one."""

    def __init__(self, row: Row) -> None:
        self.texts: list[str] = []
        self.media: list[tuple[str, bytes, bool]] = []
        self._files = {modality: iter(files) for modality, files in row.media.items()}

    def of_text(self, text: str) -> str:
        core = text.strip()
        if not any(one in text for one in SPELLED):
            return text
        if core not in self.texts:
            self.texts.append(core)
        return text.replace(core, f"\ue000{self.texts.index(core)}\ue001")

    def of_medium(self, modality: str, is_written: bool) -> str:
        self.media.append((modality, next(self._files[modality]), is_written))
        return "\ue002"


def as_marked(row: Row, marks: Marks, *, text_arguments: bool, parts: bool) -> list[dict[str, Any]]:
    """The messages as transformers takes them: ``parts`` stay a list, and otherwise are one text."""
    messages = copy.deepcopy(row.messages)
    for message in messages:
        for key in [key for key, value in message.items() if key == "weight" or (value is None and key != "content")]:
            del message[key]
        for number, one in enumerate(message.get("tool_calls", ())):
            function = one.get("function", one)
            given = function["arguments"] or {}
            given = json.loads(given) if isinstance(given, str) else given
            given = json.dumps(given, ensure_ascii=False) if text_arguments else given
            function = {"name": function["name"], "arguments": given}
            message["tool_calls"][number] = {"id": one["id"], "type": "function", "function": function}
        content, is_tool = message["content"], message["role"] == "tool"
        if content is None:
            message["content"] = ""
        elif isinstance(content, str):
            message["content"] = content if is_tool else marks.of_text(content)
        else:
            shown = [
                (p["text"] if is_tool else marks.of_text(p["text"]))
                if p["type"] == "text"
                else marks.of_medium(p["type"], message["role"] == "assistant")
                for p in content
            ]
            message["content"] = [part("text", one) for one in shown] if parts else "".join(shown)
    return messages


def expected(
    row: Row, owner: PreTrainedTokenizerBase, turns: str, sizes: Any, *, text_arguments: bool, parts: bool
) -> Expected:
    """The reference.

    Args:
        row: a conversation.
        owner: a tokenizer with a chat template.
        turns: finds the assistant's turns in a text of the template: the first group of each match.
        sizes: ``(modality, file, is written)`` -> the start token of a medium, and its number of tokens.
        text_arguments: the template takes the arguments of calls as JSON text.
        parts: the template takes contents as parts.
    """
    marks = Marks(row)
    messages = as_marked(row, marks, text_arguments=text_arguments, parts=parts)
    tools = json.loads(row.tools) if isinstance(row.tools, str) else row.tools
    rendered = owner.apply_chat_template(messages, tools=tools, tokenize=False)
    spans = [match.span(1) for match in re.finditer(turns, rendered, re.DOTALL) if match[1]]
    weights = [message.get("weight") for message in row.messages if message["role"] == "assistant"]
    assert len(spans) == len(weights), (rendered, spans, weights)
    is_trained = np.zeros(len(rendered), dtype=bool)
    for (start, stop), weight in zip(spans, weights, strict=True):
        is_trained[start:stop] = weight is None or bool(weight)
    text, flags, places, end = "", [], [], 0
    for match in (*MARK.finditer(rendered), None):
        start = len(rendered) if match is None else match.start()
        text, flags = text + rendered[end:start], flags + is_trained[end:start].tolist()
        if match is None:
            break
        end = match.end()
        if match[1] is not None:
            spelled = marks.texts[int(match[1])]
            text, flags = text + spelled, flags + [bool(is_trained[start])] * len(spelled)
            continue
        held = marks.media[len(places)]
        token, number = sizes(*held)
        places.append((len(text) + len(token), len(text) + len(token) * (1 + number)))
        text, flags = text + token * (1 + number), flags + [held[2]] * len(token) + [False] * len(token) * number
    encoded = owner(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])
    media = [np.flatnonzero((starts >= a) & (starts < b)).tolist() for a, b in places]
    return Expected(encoded["input_ids"], np.array(flags)[starts], media, marks.media)
