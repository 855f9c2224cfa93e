"""Render conversations with a HF chat template, and find the text that the assistant writes.

The assistant's text of a message is the text that the template writes for this message
(:mod:`omnitrain.data.chat.template_marks`), from the end of the generation prompt to the last special token, which is
included: content, reasoning and tool calls. In a template with ``{% generation %}`` it is the text inside these blocks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.parts import Message, calls_of, content_parts, is_trained, name_of, with_text_arguments
from omnitrain.data.chat.template_marks import (
    OTHERS,
    OWN,
    THOUGHT,
    MarkedText,
    Span,
    has_marks,
    keys_of,
    marked_messages,
    marking_template,
)
from omnitrain.data.sources.turns import FIELDS
from omnitrain.errors import UserError

Tools = Sequence[dict[str, Any]]

_PROBE = "\U000f0002"
_BETWEEN = re.compile(r"\n|</?\w+>")  # lines, and tags such as <think>
_ASIDE = "give this message a `weight` of 0, or remove what is not written"
_TOOL = "omnitrain_probe"
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": _TOOL, "parameters": {"type": "object"}}}]
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _TOOL, "arguments": {"omnitrain_argument": "a"}}}


class ChatTemplate:
    """The chat template of a HF processor or tokenizer.

    ``end``: the special token after an assistant's last content, if any. ``keys``: strings and names in its code.
    """

    def __init__(self, owner: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Learn what the template of ``owner`` writes; UserError: none, or no plain answer can be rendered."""
        if not getattr(owner, "chat_template", None):
            raise UserError(
                f"{type(owner).__name__} has no chat template; set data.processor to a processor that has one, or "
                "describe the format in data.chat"
            )
        self._owner = owner
        self._special = tuple(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token).strip()
        )
        self._takes_text = self._takes_parts = True
        self._takes_parts = _PROBE in self._probe([_asks([{"type": "text", "text": _PROBE}])])
        self._takes_text = not self._takes_parts or _PROBE in self._probe([_asks(_PROBE)])
        self.keys = keys_of(self._source(())) | keys_of(self._source(_TOOLS))
        prompts = self._prompts([_asks("a")])
        self._openings = tuple(dict.fromkeys([*prompts, *self._headers()])) if prompts else ()
        self.end = self._end()

    def render(self, messages: list[Message], tools: Tools = (), *, add_generation_prompt: bool = False) -> str:
        """Return messages and tools as text; ValueError: refused; UserError: no tools or calls are written."""
        if not messages:
            raise ValueError("the row has no messages")
        if tools and not self._takes_tools:
            raise UserError(
                "the chat template does not write `tools`; set data.processor to a processor whose template does, or "
                "set `columns.tools` to null"
            )
        shaped = [self._shaped(message) for message in messages]
        return self._apply(self._source(tools), shaped, tools, add_generation_prompt)

    def assistant_spans(self, text: str, messages: list[Message], tools: Tools = ()) -> list[Span]:
        """Return the characters ``[start, stop)`` of ``text`` that the assistant writes, end tokens included, in order.

        Messages with a ``weight`` of 0 are skipped. ``text`` is the result of :meth:`render` for the other arguments.
        Raises ValueError: the characters cannot be found, or the template leaves out text of the assistant; UserError:
        the template does not write thoughts.
        """
        trained = [index for index, message in enumerate(messages) if is_trained(message)]
        if not trained:
            return []
        if self._thoughts is None and any(messages[index].get("reasoning_content") for index in trained):
            raise UserError(
                "the chat template does not write thoughts (`reasoning_content`), so the bare answer would be trained; "
                "set data.processor to a processor whose template does, write them into `content`, or remove them"
            )
        marked = self._marked(text, messages, tools)
        return [span for index in trained for span in self._written(marked, messages, tools, index)]

    def _marked(self, text: str, messages: list[Message], tools: Tools) -> MarkedText:
        if has_marks(text):
            raise ValueError("the messages contain characters U+F0010 to U+F0017, which omnitrain reserves")
        shown = self._render_marked(messages, tools, texts=True)
        _require_shown(shown, messages)
        marked = shown if shown.text == text else self._render_marked(messages, tools, texts=False)
        if marked.text != text:
            raise ValueError("the chat template writes a different text when omnitrain marks its messages")
        return marked

    def _render_marked(
        self, messages: list[Message], tools: Tools, *, texts: bool, add_generation_prompt: bool = False
    ) -> MarkedText:
        shaped = marked_messages([self._shaped(message) for message in messages], texts=texts)
        source = marking_template(self._source(tools))
        return MarkedText.of(self._apply(source, shaped, tools, add_generation_prompt))

    def _written(self, marked: MarkedText, messages: list[Message], tools: Tools, index: int) -> list[Span]:
        """Return the assistant's spans of one message: one, or several with ``{% generation %}``."""
        pieces = marked.pieces.get(index, [])
        if len(pieces) != 1:
            raise ValueError(
                f"the chat template writes message {index + 1} in {len(pieces)} places, so the assistant's text cannot "
                "be found; the template must write each message in one place, in a `for` loop over the messages"
            )
        ((start, stop),) = pieces
        if "endgeneration" not in self._source(tools):
            start = self._start(marked.text, start, messages[: index + 1], tools)
            return [(start, self._stop(marked.text, start, stop))]
        inside = [span for span in marked.generated if start <= span[0] and span[1] <= stop]
        if not inside:
            raise ValueError(f"the chat template has no {{% generation %}} around message {index + 1}")
        return inside

    def _start(self, text: str, start: int, messages: list[Message], tools: Tools) -> int:
        """Return where generation begins in the last of ``messages``, which starts at ``start``."""
        for opening in self._openings:
            if text.startswith(opening, start):
                return start + len(opening)
        if len(messages) == 1:
            return start + self._lead(messages[0], tools)
        prompts = self._prompts(messages[:-1], tools)  # the prompt may depend on earlier messages
        if found := [prompt for prompt in prompts if text.startswith(prompt, start)]:
            return start + len(found[0])
        if prompts and not text[:start].endswith(tuple(prompts)):
            raise ValueError(
                f"the chat template opens message {len(messages)} with {text[start : start + 40]!r}, but its "
                f"generation prompt is {prompts[0]!r}"
            )
        return start

    def _lead(self, first: Message, tools: Tools) -> int:
        """Return how much comes before a first message of the assistant: a default system prompt, the opening."""
        marked = self._render_marked([first | {"content": _PROBE}], tools, texts=False)
        start, stop = marked.pieces.get(0, [(0, 0)])[0]
        lead = marked.text[start:stop].partition(_PROBE)[0]
        for opening in self._openings:
            if opening in lead:
                return lead.index(opening) + len(opening)
        return next((len(lead) - len(header) for header in self._headers() if lead.endswith(header)), 0)

    def _stop(self, text: str, start: int, stop: int) -> int:
        """Return the end of the last special token before ``stop``, or of one directly after it, or ``stop``."""
        written = text[start:stop].rstrip()
        if written.endswith(self._special):
            return start + len(written)
        following = len(text) - len(text[stop:].lstrip())
        token = self._special_at(text, following)
        return following + len(token) if token else stop

    def _special_at(self, text: str, start: int) -> str:
        return max((token for token in self._special if text.startswith(token, start)), key=len, default="")

    def _shaped(self, message: Message) -> Message:
        parts = [{k: v for k, v in part.items() if v is not None} for part in content_parts(message)]
        handled = {"content", "tool_calls", "weight", "reasoning_content"}
        others = {key: value for key, value in message.items() if value is not None and key not in handled}
        thoughts = message.get("reasoning_content")
        if thoughts is not None and self._thoughts is not None:
            others[self._thoughts] = thoughts
        no_content: Message = {}
        if calls := calls_of(message):
            if self._call_form is None:
                raise UserError(
                    "the chat template does not write `tool_calls`; set data.processor to a processor whose template "
                    "does, or drop these rows"
                )
            no_content, as_text = self._call_form
            others["tool_calls"] = [with_text_arguments(call) for call in calls] if as_text else calls
        content = message.get("content")
        return others | (no_content if content is None else {"content": self._content(content, parts)})

    def _content(self, content: Any, parts: list[Message]) -> str | list[Message]:
        if self._takes_parts and not (self._takes_text and isinstance(content, str)):
            return parts
        media = [part["type"] for part in parts if part["type"] != "text"]
        if media:
            raise ValueError(f"the chat template takes only text, but the messages show {media}")
        return "".join(part["text"] for part in parts)

    @cached_property
    def _call_form(self) -> tuple[Message, bool] | None:
        """Return the fields for empty content, and whether arguments are JSON text; None if no call is written."""
        for as_text in (False, True):
            for no_content in ({}, {"content": ""}):
                call = with_text_arguments(_CALL) if as_text else _CALL
                turn = {"role": "assistant", **no_content, "tool_calls": [call]}
                text = self._try([self._shaped(_asks("a")), turn], _TOOLS)
                parts = text.rpartition(_TOOL)
                if "omnitrain_argument" in parts[2] and "{'omnitrain_argument'" not in text:
                    return no_content, as_text
        return None

    @cached_property
    def _thoughts(self) -> str | None:
        """Return the key under which the template reads thoughts; None: it writes none."""
        answer = self._shaped({"role": "assistant", "content": "a"})
        for name in FIELDS["reasoning_content"]:
            if _PROBE in self._try([self._shaped(_asks("a")), answer | {name: _PROBE}], ()):
                return name
        return None

    @cached_property
    def _takes_tools(self) -> bool:
        return _TOOL in self._try([self._shaped(_asks("a"))], _TOOLS)

    def _try(self, shaped: list[Message], tools: Tools) -> str:
        try:
            return self._apply(self._source(tools), shaped, tools, False)
        except ValueError:
            return ""

    def _source(self, tools: Tools) -> str:
        """Return the template for a conversation with these tools; an owner may have several named templates."""
        if hasattr(self._owner, "get_chat_template"):
            return str(self._owner.get_chat_template(tools=list(tools) or None))
        named = self._owner.chat_template
        return str(named["default"] if isinstance(named, dict) else named)

    def _apply(self, source: str, shaped: list[Message], tools: Tools, add_generation_prompt: bool) -> str:
        try:
            return self._owner.apply_chat_template(
                shaped,
                chat_template=source,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def _prompts(self, messages: list[Message], tools: Tools = ()) -> list[str]:
        """Return what ``add_generation_prompt`` adds, and all text after the last message, the longer one first."""
        without, prompted = (
            self._render_marked(messages, tools, texts=False, add_generation_prompt=is_prompted)
            for is_prompted in (False, True)
        )
        added = prompted.text.removeprefix(without.text) if prompted.text.startswith(without.text) else ""
        after = prompted.text[prompted.last_stop :] if prompted.pieces else ""
        return sorted({added, after} - {""}, key=len, reverse=True)

    def _headers(self) -> list[str]:
        """Return the texts before the content of an assistant's message, if it is the last one and if it is not."""
        marked = [self._render_marked(_ANSWERED + more, (), texts=False) for more in ([], [_asks("b")])]
        headers = (one.text[start:stop].partition(_PROBE)[0] for one in marked for start, stop in one.pieces.get(1, []))
        return [header for header in headers if header]

    def _end(self) -> str | None:
        texts = [self._probe(_ANSWERED + more) for more in ([], [_asks("b")])]
        return next(filter(None, (self._special_at(text.partition(_PROBE)[2].lstrip(), 0) for text in texts)), None)

    def _probe(self, messages: list[Message]) -> str:
        try:
            return self.render(messages)
        except ValueError as error:
            if self._takes_parts:
                return ""
            raise UserError(f"the chat template of {type(self._owner).__name__} cannot be used: {error}") from error


def _asks(content: str | list[Message]) -> Message:
    return {"role": "user", "content": content}


_ANSWERED = [_asks("a"), {"role": "assistant", "content": _PROBE}]


def _require_shown(shown: MarkedText, messages: list[Message]) -> None:
    """Raise if the text of an assistant message lacks what it says, or has the content of another message."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index not in shown.pieces:
            continue
        text = "".join(shown.text[start:stop] for start, stop in shown.pieces[index])
        where, seen = f"the assistant's message {index + 1}", shown.seen.get(index, set())
        if OTHERS in seen:
            raise ValueError(f"the chat template writes other messages inside {where}")
        if missing := [name for call in calls_of(message) if (name := name_of(call)) not in text]:
            raise ValueError(f"the chat template does not write these calls of message {index + 1}: {missing}")
        _require_said(message, text, where, is_seen=OWN in seen or bool(calls_of(message)))
        if is_trained(message) and THOUGHT not in seen and (message.get("reasoning_content") or "").strip():
            raise ValueError(f"the chat template does not write the thoughts (reasoning_content) of {where}; {_ASIDE}")


def _require_said(message: Message, text: str, where: str, *, is_seen: bool) -> None:
    """Raise if ``text`` has no text of a message, or only a part of it. A template may write all of it otherwise."""
    said = "\n".join(part["text"] for part in content_parts(message) if part["type"] == "text")
    if said.strip() and not is_seen:
        raise ValueError(f"the chat template does not write the text of {where}")
    lines = [line.strip() for line in _BETWEEN.split(said) if line.strip()]
    left_out, end = [], 0
    for line in lines:
        at = text.find(line, end)
        end = end if at < 0 else at + len(line)
        left_out += [line] * (at < 0)
    if is_trained(message) and 0 < len(left_out) < len(lines):
        raise ValueError(f"the chat template does not write {left_out[0][:40]!r} of {where}; {_ASIDE}")
