"""Find the text that a chat template writes for each message, with marks that the template's loops print.

A template iterates over the messages in ``for`` loops. In a copy of its source, each iteration first prints a mark,
which the message carries under a reserved key, and prints another mark at its end. Loops over other things print
nothing, because their items have no such key. So each character of the text belongs to a known message, whatever the
template does with contents, reasoning or tool calls. Without the marks, the text must equal the unmarked text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any

import jinja2

from omnitrain.data.chat.parts import Message
from omnitrain.data.sources.turns import FIELDS

Span = tuple[int, int]

OWN, OTHERS = "\U000f0010", "\U000f0011"  # mark before the last character of a text of the assistant, or of others
_BEGIN, _BEGUN, _END = "\U000f0012", "\U000f0013", "\U000f0014"
_GENERATES, _GENERATED = "\U000f0015", "\U000f0016"
THOUGHT = "\U000f0017"  # mark before the last character of the assistant's thoughts
_MARKS = re.compile(f"{_BEGIN}([\\d,]+){_BEGUN}|[{OWN}-{THOUGHT}]")
_BEGIN_KEY, _END_KEY = "omnitrain_begin", "omnitrain_end"
_LEXER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers reads chat templates
_WITHOUT_OUTPUT = {"comment_begin", "comment", "comment_end", "raw_begin", "raw_end"}


@dataclass
class MarkedText:
    """A rendered conversation; ``pieces``: index of a message -> characters ``[start, stop)``, none adjacent."""

    text: str = ""  # without the marks
    pieces: dict[int, list[Span]] = field(default_factory=dict)
    generated: list[Span] = field(default_factory=list)  # characters inside {% generation %}
    seen: dict[int, set[str]] = field(default_factory=dict)  # index of a message -> OWN, OTHERS, THOUGHT inside it
    last_stop: int = 0  # of the last iteration of a loop over messages

    @classmethod
    def of(cls, marked: str) -> MarkedText:
        """Read the marks of ``marked``; ValueError: the marks do not form pairs."""
        read, end = cls(), 0
        at: list[int] = []
        began: list[int] = []
        for mark in _MARKS.finditer(marked):
            read._write(marked[end : mark.start()], at)
            end = mark.end()
            if mark[1] is not None:
                equal = [int(index) for index in mark[1].split(",")]
                at.append(next((index for index in equal if index not in read.pieces), equal[-1]))
            elif mark[0] == _GENERATES:
                began.append(len(read.text))
            elif mark[0] in (OWN, OTHERS, THOUGHT):
                read.seen.setdefault(at[-1] if at else -1, set()).add(mark[0])
            elif not (at if mark[0] == _END else began):
                raise ValueError("the chat template does not write its messages one after another")
            elif mark[0] == _END:
                at.pop()
                read.last_stop = len(read.text)
            else:
                read.generated.append((began.pop(), len(read.text)))
        read._write(marked[end:], at)
        return read

    def _write(self, text: str, at: Sequence[int]) -> None:
        start, self.text = len(self.text), self.text + text
        if text and at:
            pieces = self.pieces.setdefault(at[-1], [])
            if pieces and pieces[-1][1] == start:
                start = pieces.pop()[0]
            pieces.append((start, len(self.text)))


def has_marks(text: str) -> bool:
    """Whether a text contains characters that are reserved for marks."""
    return _MARKS.search(text) is not None


def marked_messages(messages: Sequence[Message], *, texts: bool) -> list[Message]:
    """Return the messages with keys that a template of :func:`marking_template` prints.

    With ``texts``, each text gets a mark as well, before its last non-space character, so that trimming keeps it.
    Equal messages stay equal, because templates compare messages (Mistral's do): their mark names all of them.
    """
    marked = []
    for message in messages:
        equal = [str(index) for index, other in enumerate(messages) if other == message]
        marks = {_BEGIN_KEY: f"{_BEGIN}{','.join(equal)}{_BEGUN}", _END_KEY: _END}
        marked.append((_marked_texts(message) if texts else message) | marks)
    return marked


def _marked_texts(message: Message) -> Message:
    """Mark the content, the thoughts, and nested fields that the assistant does not write (``tool_responses``)."""
    mark = OWN if message["role"] == "assistant" else OTHERS
    nested = {key: value for key, value in message.items() if isinstance(value, (list, dict)) and key != "tool_calls"}
    thoughts = {key: _marked_within(message[key], THOUGHT) for key in FIELDS["reasoning_content"] if key in message}
    marked = message | {key: _marked_within(value, OTHERS) for key, value in nested.items()} | thoughts
    return marked | ({"content": _marked_within(message["content"], mark)} if "content" in message else {})


def _marked_within(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        last = len(value.rstrip()) - 1
        return value if last < 0 else value[:last] + mark + value[last:]
    if isinstance(value, dict):
        return {key: one if key == "type" else _marked_within(one, mark) for key, one in value.items()}
    return [_marked_within(one, mark) for one in value] if isinstance(value, list) else value


@lru_cache
def marking_template(source: str) -> str:
    """Return a template that prints ``source``'s text and marks of :func:`marked_messages`."""
    blocks = _Blocks()
    return "".join(blocks.around(s) if isinstance(s, list) else s for s in _statements(_LEXER.lex(source)))


def keys_of(source: str) -> frozenset[str]:
    """Return the strings, and the names after a dot, in the code of a chat template."""
    tokens = [(kind, value) for _, kind, value in _LEXER.lex(source) if kind != "whitespace"]
    return frozenset(
        value.strip("'\"")
        for (_, before), (kind, value) in pairwise(tokens)
        if kind == "string" or (kind == "name" and before == ".")
    )


def _statements(tokens: Iterable[tuple[int, str, str]]) -> Iterator[str | list[str]]:
    """Yield texts and expressions as strings, and each block tag as a list of its words."""
    inside: list[str] = []
    for _, kind, value in tokens:
        if kind == "data":
            yield _literal(value)
        elif kind in ("block_begin", "variable_begin"):
            inside = []
        elif kind == "block_end":
            yield inside
        elif kind == "variable_end":
            yield "{{ " + "".join(inside) + " }}"
        elif kind not in _WITHOUT_OUTPUT:
            inside.append(value)


def _literal(text: str) -> str:
    """Return an expression that prints ``text`` independent of white space control around it."""
    escaped = text.encode("unicode_escape").decode().replace('"', '\\"')
    return f'{{{{ "{escaped}" }}}}' if text else ""


class _Blocks:
    """The open ``for`` and ``if`` blocks, each with the name of its loop item, or None."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str | None]] = []
        self._numbers = count()

    def around(self, tag: list[str]) -> str:
        """Return the block tag with the expressions around it that print the marks."""
        words = [word for word in tag if not word.isspace()]
        block = "{%+ " + "".join(tag) + " +%}"
        before, after = "", ""
        if words[0] in ("for", "if"):
            is_loop = words[0] == "for" and words[2] == "in"  # loops over messages have one name for the item
            name = f"omnitrain_item_{next(self._numbers)}" if is_loop else None
            self._open.append((words[0], name))
            after = f"{{% set {name} = {words[1]} %}}{{{{ {name}['{_BEGIN_KEY}'] }}}}" if name else ""
        elif words[0] in ("endif", "endfor"):
            before = _end_of(self._open.pop())
        elif words[0] == "else":
            before, self._open[-1] = _end_of(self._open[-1]), ("else", None)
        elif words[0] in ("continue", "break"):
            before = _end_of(next(block for block in reversed(self._open) if block[0] == "for"))
        elif words[0] == "generation":
            after = _literal(_GENERATES)
        elif words[0] == "endgeneration":
            before = _literal(_GENERATED)
        return before + block + after


def _end_of(block: tuple[str, str | None]) -> str:
    return f"{{{{ {block[1]}['{_END_KEY}'] }}}}" if block[1] else ""
