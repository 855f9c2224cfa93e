"""A HF chat template as it is: conversations -> text, and where in it the assistant speaks.

What the assistant writes in a turn is what the template writes while it is at this message
(:mod:`omnitrain.data.template_marks`), without what generation is given in front of it, up to and with the last special
token: content, reasoning and tool calls alike. Of a template with ``{% generation %}`` it is what stands inside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from omnitrain.data.parts import Message, content_parts, is_trained
from omnitrain.data.template_marks import OTHERS, OWN, MarkedText, Span, has_marks, marked_messages, marking_template
from omnitrain.data.tool_calls import calls_of, name_of, with_text_arguments
from omnitrain.errors import UserError

Tools = Sequence[dict[str, Any]]

_PROBE = "\U000f0002"
_TOOL = "omnitrain_probe"
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": _TOOL, "parameters": {"type": "object"}}}]
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _TOOL, "arguments": {"omnitrain_argument": "a"}}}


class ChatTemplate:
    """The chat template of a HF processor or tokenizer.

    Attributes:
        generation_prompt: the text that opens an assistant's message.
        end: the special token after an assistant's last content; None: the template writes none.
    """

    def __init__(self, owner: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out by rendering short conversations what the template expects and writes.

        Args:
            owner: a HF processor or tokenizer with a chat template.
            tokenizer: its tokenizer.

        Raises:
            UserError: no chat template, or one that renders no plain question and answer.
        """
        if not getattr(owner, "chat_template", None):
            raise UserError(
                f"{type(owner).__name__} has no chat template; name a processor that has one (data.processor), or "
                "describe the format (data.chat)"
            )
        self._owner = owner
        self._special = tuple(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token).strip()
        )
        self._takes_text = self._takes_parts = True
        self._takes_parts = _PROBE in self._probe([_asks([{"type": "text", "text": _PROBE}])])
        self._takes_text = not self._takes_parts or _PROBE in self._probe([_asks(_PROBE)])
        prompts = self._prompts([_asks("a")])
        self.generation_prompt = prompts[0] if prompts else ""
        self._openings = tuple(dict.fromkeys([*prompts, *self._headers()])) if prompts else ()
        self.end = self._end()

    def render(self, messages: list[Message], tools: Tools = (), *, add_generation_prompt: bool = False) -> str:
        """The text of ``messages``.

        Args:
            messages: contents are texts or parts.
            tools: that the assistant may call; see :func:`omnitrain.data.tool_calls.tools_of`.
            add_generation_prompt: what opens an assistant's message follows.

        Raises:
            ValueError: the template refuses them.
            UserError: the template has no place for tools, or for calls of them.
        """
        if tools and not self._takes_tools:
            raise UserError(
                "the chat template does not write `tools`; name a processor whose template does (data.processor), or a "
                "column that does not exist (`columns.tools`)"
            )
        shaped = [self._shaped(message) for message in messages]
        return self._apply(self._source(tools), shaped, tools, add_generation_prompt)

    def assistant_spans(self, text: str, messages: list[Message], tools: Tools = ()) -> list[Span]:
        """Characters ``[start, stop)`` of ``text`` that the assistant writes, its end token included; in order.

        Args:
            text: of :meth:`render`.
            messages: what was rendered; those with a ``weight`` of 0 are left out.
            tools: what was rendered.

        Raises:
            ValueError: they cannot be told.
        """
        trained = [index for index, message in enumerate(messages) if is_trained(message)]
        if not trained:
            return []
        marked = self._marked(text, messages, tools)
        return [span for index in trained for span in self._written(marked, messages, tools, index)]

    def _marked(self, text: str, messages: list[Message], tools: Tools) -> MarkedText:
        if has_marks(text):
            raise ValueError("the messages hold characters U+F0010 to U+F0016, which omnitrain uses itself")
        shown = self._render_marked(messages, tools, texts=True)
        _require_shown(shown, messages)
        marked = shown if shown.text == text else self._render_marked(messages, tools, texts=False)
        if marked.text != text:
            raise ValueError("the chat template writes another text where it tells which message it is at")
        return marked

    def _render_marked(
        self, messages: list[Message], tools: Tools, *, texts: bool, add_generation_prompt: bool = False
    ) -> MarkedText:
        shaped = marked_messages([self._shaped(message) for message in messages], texts=texts)
        source = marking_template(self._source(tools))
        return MarkedText.of(self._apply(source, shaped, tools, add_generation_prompt))

    def _written(self, marked: MarkedText, messages: list[Message], tools: Tools, index: int) -> list[Span]:
        """What the assistant writes of one message: a single span, but for templates with ``{% generation %}``."""
        pieces = marked.pieces.get(index, [])
        if len(pieces) != 1:
            raise ValueError(
                f"the chat template writes message {index + 1} in {len(pieces)} places, so what the "
                "assistant writes cannot be found; it can where a `for` loop over the messages writes each in one place"
            )
        ((start, stop),) = pieces
        if "endgeneration" not in self._source(tools):
            start = self._start(marked.text, start, messages[:index], tools)
            return [(start, self._stop(marked.text, start, stop))]
        inside = [span for span in marked.generated if start <= span[0] and span[1] <= stop]
        if not inside:
            raise ValueError(f"the chat template has no {{% generation %}} around message {index + 1}")
        return inside

    def _start(self, text: str, start: int, before: list[Message], tools: Tools) -> int:
        """Where generation begins in what the template writes from ``start`` on."""
        for opening in self._openings:
            if text.startswith(opening, start):
                return start + len(opening)
        prompts = self._prompts(before, tools) if before else []  # it may depend on what is before
        if found := [prompt for prompt in prompts if text.startswith(prompt, start)]:
            return start + len(found[0])
        if prompts and not text[:start].endswith(tuple(prompts)):
            raise ValueError(
                f"the chat template opens message {len(before) + 1} with {text[start : start + 40]!r}, and gives "
                f"generation {prompts[0]!r} there"
            )
        return start

    def _stop(self, text: str, start: int, stop: int) -> int:
        """The end of the last special token before ``stop``, or of one that follows at once, or ``stop``."""
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
        own = {"content", "tool_calls", "weight"}
        others = {key: value for key, value in message.items() if value is not None and key not in own}
        nothing: Message = {}
        if calls := calls_of(message):
            if self._call_form is None:
                raise UserError(
                    "the chat template does not write `tool_calls`; name a processor whose template does "
                    "(data.processor), or drop these rows"
                )
            nothing, as_text = self._call_form
            others["tool_calls"] = [with_text_arguments(call) for call in calls] if as_text else calls
        content = message.get("content")
        return others | (nothing if content is None else {"content": self._content(content, parts)})

    def _content(self, content: Any, parts: list[Message]) -> str | list[Message]:
        """The content as it is written, if the template takes it so."""
        if self._takes_parts and not (self._takes_text and isinstance(content, str)):
            return parts
        media = [part["type"] for part in parts if part["type"] != "text"]
        if media:
            raise ValueError(f"the chat template takes text alone, and the messages show {media}")
        return "".join(part["text"] for part in parts)

    @cached_property
    def _call_form(self) -> tuple[Message, bool] | None:
        """What stands for no content, and whether arguments are JSON text; None: no call is written."""
        for as_text in (False, True):
            for nothing in ({}, {"content": ""}):
                call = with_text_arguments(_CALL) if as_text else _CALL
                turn = {"role": "assistant", **nothing, "tool_calls": [call]}
                text = self._try([self._shaped(_asks("a")), turn], _TOOLS)
                parts = text.rpartition(_TOOL)
                if "omnitrain_argument" in parts[2] and "{'omnitrain_argument'" not in text:
                    return nothing, as_text
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
        """The template for a conversation with these tools, of several ones under names."""
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
        """What generation may be given after ``messages`` alone, longest first; empty: nothing.

        It is what the template adds for it, and what it writes after the last message in any case.
        """
        without, ready = (
            self._render_marked(messages, tools, texts=False, add_generation_prompt=is_ready)
            for is_ready in (False, True)
        )
        added = ready.text.removeprefix(without.text) if ready.text.startswith(without.text) else ""
        after = ready.text[ready.last_stop :] if ready.pieces else ""
        return sorted({added, after} - {""}, key=len, reverse=True)

    def _headers(self) -> list[str]:
        """What the template writes of an assistant's message before the content: of the last one, and of another."""
        conversation = [_asks("a"), {"role": "assistant", "content": _PROBE}]
        found = []
        for more in ([], [_asks("b")]):
            marked = self._render_marked(conversation + more, (), texts=False)
            for start, stop in marked.pieces.get(1, []):
                found.append(marked.text[start:stop].partition(_PROBE)[0])
        return [header for header in found if header]

    def _end(self) -> str | None:
        conversation = [_asks("a"), {"role": "assistant", "content": _PROBE}]
        texts = [self._probe(conversation + more) for more in ([], [_asks("b")])]
        return next(filter(None, (self._special_at(text.partition(_PROBE)[2].lstrip(), 0) for text in texts)), None)

    def _probe(self, messages: list[Message]) -> str:
        try:
            return self.render(messages)
        except ValueError as error:
            if self._takes_parts:
                return ""
            raise UserError(f"the chat template of {type(self._owner).__name__} is of no use: {error}") from error


def _asks(content: str | list[Message]) -> Message:
    return {"role": "user", "content": content}


def _require_shown(shown: MarkedText, messages: list[Message]) -> None:
    """Refuse a text in which a turn of the assistant lacks what it says, or has what another message says."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index not in shown.pieces:
            continue
        text = "".join(shown.text[start:stop] for start, stop in shown.pieces[index])
        seen, calls = shown.seen.get(index, set()), calls_of(message)
        if OTHERS in seen:
            raise ValueError(f"the chat template writes what others say within message {index + 1}, of the assistant")
        if missing := [name_of(call) for call in calls if name_of(call) not in text]:
            raise ValueError(f"the chat template does not write these calls of message {index + 1}: {missing}")
        says = any(part.get("text", "").strip() for part in content_parts(message))
        if says and not calls and OWN not in seen:
            raise ValueError(f"the chat template does not write what the assistant says in message {index + 1}")
