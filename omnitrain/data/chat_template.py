"""A HF chat template as it is: conversations -> text, and where in it the assistant speaks.

The spans of the assistant come from rendering a second time with marks (private-use characters) around each assistant
message's content: without its marks that text must be the plain one. Templates that rewrite the content, so that no
mark survives, are read by what surrounds it: the generation prompt in front and the end token behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from omnitrain.data.parts import Message, content_parts
from omnitrain.errors import UserError

Span = tuple[int, int]

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_PROBE = "\U000f0002"


class ChatTemplate:
    """The chat template of a HF processor or tokenizer.

    Attributes:
        generation_prompt: the text that opens an assistant's message.
        ends: the special tokens behind an assistant's content: behind the last one, and within a conversation. Empty:
            the template writes none.
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
        self._special = _any_of({str(token) for token in tokenizer.added_tokens_decoder.values() if token.special})
        self._takes_parts = True
        self._takes_parts = _PROBE in self._probe([_asks(_PROBE)])
        self.generation_prompt = self._generation_prompt()
        self.ends = self._ends()
        self._end = _any_of(set(self.ends))
        self._ending = re.compile(rf"\s*(?:{self._end.pattern})")

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of ``messages``, whose contents are parts.

        Raises:
            ValueError: the template refuses them.
        """
        shaped = [self._shaped(message) for message in messages]
        try:
            return self._owner.apply_chat_template(shaped, tokenize=False, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def assistant_spans(self, text: str, messages: list[Message]) -> list[Span]:
        """Characters ``[start, stop)`` of ``text`` that the assistant writes, its end token included; in order.

        Args:
            text: of :meth:`render`.
            messages: what was rendered.

        Raises:
            ValueError: they cannot be told.
        """
        count = sum(message["role"] == "assistant" for message in messages)
        if not count:
            return []
        for clean in _CLEANINGS:
            contents = _unmarked(self.render([_marked(message, clean) for message in messages]), text, count)
            if contents is not None:
                return [self._whole_turn(text, span) for span in contents]
        return self._between_prompt_and_end(text, count)

    def _shaped(self, message: Message) -> Message:
        parts = [{k: v for k, v in part.items() if v is not None} for part in content_parts(message)]
        others = {key: value for key, value in message.items() if value is not None}
        if self._takes_parts:
            return others | {"content": parts}
        media = [part["type"] for part in parts if part["type"] != "text"]
        if media:
            raise ValueError(f"the chat template takes text alone, and the messages show {media}")
        return others | {"content": "".join(part["text"] for part in parts)}

    def _whole_turn(self, text: str, content: Span) -> Span:
        """The content, with what generation would have to write before it and the end token behind it."""
        start, stop = content
        opening = text.rfind(self.generation_prompt, 0, start) if self.generation_prompt else -1
        between = text[opening + len(self.generation_prompt) : start]
        is_of_this_turn = not self._end.search(between) if self.ends else not between.strip()
        if opening >= 0 and is_of_this_turn:
            start -= len(between)
        else:  # a tokenizer may join white space to the first word, and no prompt ends with it
            start = len(text[:start].rstrip())
        ending = self._ending.match(text, stop)
        return start, ending.end() if ending else stop

    def _between_prompt_and_end(self, text: str, count: int) -> list[Span]:
        prompt = self.generation_prompt
        openings = [match.end() for match in re.finditer(re.escape(prompt), text)] if prompt else []
        endings = [self._end.search(text, opening) for opening in openings]
        if len(openings) != count or not self.ends:
            raise ValueError(
                f"the chat template rewrites the assistant's {count} messages, and its generation prompt {prompt!r} "
                f"stands {len(openings)} times in the text"
            )
        return [(a, end.end() if end else len(text)) for a, end in zip(openings, endings, strict=True)]

    def _generation_prompt(self) -> str:
        question = [_asks("a")]
        without, ready = self._probe(question), self._probe(question, add_generation_prompt=True)
        return ready.removeprefix(without) if ready.startswith(without) else ""

    def _ends(self) -> tuple[str, ...]:
        conversation = [_asks("a"), {"role": "assistant", "content": _PROBE}]
        texts = [self._probe(conversation + more) for more in ([], [_asks("b")])]
        found = [self._special.match(text.partition(_PROBE)[2].lstrip()) for text in texts]
        return tuple(dict.fromkeys(match.group() for match in found if match))

    def _probe(self, messages: list[Message], **options: Any) -> str:
        try:
            return self.render(messages, **options)
        except ValueError as error:
            if self._takes_parts:
                return ""
            raise UserError(f"the chat template of {type(self._owner).__name__} is of no use: {error}") from error


def _asks(text: str) -> Message:
    return {"role": "user", "content": text}


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _marked(message: Message, clean: Callable[[list[str]], list[str]]) -> Message:
    if message["role"] != "assistant":
        return message
    texts = clean([part["text"] for part in content_parts(message)] or [""])
    texts[0] = _OPEN + texts[0]
    texts[-1] += _CLOSE
    return message | {"content": [{"type": "text", "text": text} for text in texts]}


def _strip_around(texts: list[str]) -> list[str]:
    return [texts[0].lstrip(), *texts[1:-1], texts[-1].rstrip()] if len(texts) > 1 else [texts[0].strip()]


def _strip_each(texts: list[str]) -> list[str]:
    return [text.strip() for text in texts]


# Templates that trim contents: a mark would keep the white space.
_CLEANINGS: tuple[Callable[[list[str]], list[str]], ...] = (list, _strip_around, _strip_each)


def _unmarked(marked: str, text: str, count: int) -> list[Span] | None:
    """The spans between the marks of ``marked``, in ``text``; None where marks are lost or change anything else."""
    pieces = _MARKS.split(marked)
    if "".join(_MARKS.findall(marked)) != (_OPEN + _CLOSE) * count or "".join(pieces) != text:
        return None
    borders = list(accumulate(map(len, pieces)))
    return list(zip(borders[0:-1:2], borders[1::2], strict=True))
