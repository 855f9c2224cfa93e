"""The interface of the two kinds of chat format, which turn conversations into samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.parts import MediaPart, Message, content_parts, is_trained, media_parts, tools_of
from omnitrain.data.chat.text_tokenizer import TextEncoder
from omnitrain.data.packing.sample import Grid, MediaSpan, Sample
from omnitrain.data.render.component_media import AttachedMedia
from omnitrain.data.render.hf_visuals import FrameChoice
from omnitrain.data.render.native import NativeInputs
from omnitrain.data.sources.media import MediaFile
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat


class Renderer(ABC):
    """A chat format: the recipe's own (:class:`ChatRenderer`), or a HF template (:class:`TemplateRenderer`)."""

    tokenizer: PreTrainedTokenizerBase  # the text tokenizer
    chat: ChatFormat  # the format, or the start tokens of attached media
    end_token: int  # id of the token that ends an assistant's message
    native: NativeInputs = NativeInputs()  # media of the foundation
    reads: frozenset[str] = frozenset()  # further keys of messages and parts that may change the text

    def start_token(self, key: str) -> int:
        """Return the id of the token before media of a modality or a decoder; UserError: it is not one token."""
        name = f"starts.{key}" if key in self.chat.starts else key
        return single_token(self.tokenizer, name, self.chat.start_of(key, key))

    def grid_positions(self, grid: Grid) -> np.ndarray | None:
        """Return position ids ``[axes, n + 1]`` int64 of the n tokens of a written item and of the next one, from 0.

        They are those of an item that the foundation reads. None: they are those of a text.
        """
        return None

    @abstractmethod
    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Sample:
        """Encode ``messages`` with the row's media; ValueError: not this row; UserError: no such row."""

    @abstractmethod
    def encode_text(self, row: Row, ids: list[int]) -> Sample:
        """Return the sample of tokens of a row's text without media; all of them are trained."""

    @abstractmethod
    def frame_choice(self, file: MediaFile) -> FrameChoice:
        """Return how the foundation's processor chooses the frames of a video."""

    @abstractmethod
    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """Save the tokenizer (or processor) to ``folder``. Return the settings that its files do not contain."""


def single_token(tokenizer: PreTrainedTokenizerBase, field_name: str, text: str) -> int:
    """Return the id of ``text``; UserError: it is not one token of the tokenizer."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise UserError(
            f"data.chat.{field_name}: {text!r} must be one token, but the tokenizer gives {len(ids)}: {ids}"
        )
    return int(ids[0])


_MORE_FIELDS = ("tool_calls", "function_call", "reasoning_content")


@dataclass(frozen=True)
class _Text:
    text: str
    is_trained: bool
    is_format: bool = True  # only texts of the chat format may contain control tokens


class ChatRenderer(Renderer):
    """Renders conversations in a :class:`ChatFormat`. Each text is tokenized separately, so short ones are cached."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, refused: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Check that the end is one token; ``refused``: modality that other formats can have read -> why."""
        self.tokenizer, self.chat = tokenizer, chat
        self.native = NativeInputs(refused=dict(refused))  # a copy that can be pickled
        self.end_token = single_token(tokenizer, "end", chat.end)
        self._ids: dict[tuple[str, bool], list[int]] = {}
        fields = chat.model_dump(exclude={"separator", "starts"})
        texts = (*fields.values(), *chat.starts.values())
        self._encode_text = TextEncoder(tokenizer, texts)

    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Sample:
        """See :meth:`Renderer.encode`."""
        if tools_of(row.tools):
            raise UserError(
                "the row has `tools`, which a data.chat format cannot write; set data.processor to a processor whose "
                "chat template writes them, or set `columns.tools` to null"
            )
        pieces = _render(messages, self.chat)
        if for_generation:
            pieces.append(_Text(self.chat.assistant, is_trained=False))
        ids: list[int] = []
        trained: list[bool] = []
        spans: list[MediaSpan] = []
        for piece in pieces:
            if isinstance(piece, MediaPart):
                for name, item in media.prepare(row, piece):
                    new = self._token_ids(_Text(self.chat.start_of(piece.modality, name), piece.is_target))
                    spans.append(MediaSpan(name, len(ids) + 1, item, piece.is_target))
                    ids += new + new * item.num_tokens
                    trained += [piece.is_target] + [False] * item.num_tokens
            else:
                new = self._token_ids(piece)
                ids += new
                trained += [piece.is_trained] * len(new)
        return _sample(row, ids, trained, spans)

    def frame_choice(self, file: MediaFile) -> FrameChoice:
        """See :meth:`Renderer.frame_choice`; there is no processor."""
        return FrameChoice(None, {}, file.reading)

    def encode_text(self, row: Row, ids: list[int]) -> Sample:
        """See :meth:`Renderer.encode_text`."""
        return _sample(row, ids, [True] * len(ids))

    def _token_ids(self, piece: _Text) -> list[int]:
        ids: list[int] | None = self._ids.get((piece.text, piece.is_format))
        if ids is None:
            if piece.is_format:
                ids = list(self.tokenizer(piece.text, add_special_tokens=False)["input_ids"])
            else:
                ids = self._encode_text(piece.text)
            if len(piece.text) <= 64 and len(self._ids) < 10_000:
                self._ids[piece.text, piece.is_format] = ids
        return ids

    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """See :meth:`Renderer.save_pretrained`."""
        self.tokenizer.save_pretrained(str(folder))
        return {"chat": self.chat.model_dump()}


def _sample(row: Row, ids: list[int], trained: list[bool], spans: Sequence[MediaSpan] = ()) -> Sample:
    return Sample(
        id=row.id,
        source=row.source,
        input_ids=np.array(ids, dtype=np.int64),
        loss_mask=np.array(trained, dtype=bool),
        position_ids=np.arange(len(ids), dtype=np.int64),
        spans=tuple(spans),
    )


def _render(messages: list[Message], chat: ChatFormat) -> list[_Text | MediaPart]:
    """Return messages as texts and media; UserError: no such role or field; ValueError: a wrong weight."""
    pieces: list[_Text | MediaPart] = []
    media = iter(media_parts(messages))
    for message in messages:
        opening = getattr(chat, message["role"], None) if message["role"] in ("system", "user", "assistant") else None
        if opening is None:
            raise UserError(
                f"message role {message['role']!r}: expected system, user or assistant; for other roles set "
                "data.processor to a processor whose chat template writes them"
            )
        if fields := [name for name in _MORE_FIELDS if message.get(name)]:
            raise UserError(
                f"a message has {fields}, which a data.chat format cannot write; set data.processor to a processor "
                "whose chat template writes them, or drop these rows"
            )
        trained = is_trained(message)
        pieces.append(_Text(opening, is_trained=False))
        pieces += [
            _Text(part["text"], trained, is_format=False) if part["type"] == "text" else next(media)
            for part in content_parts(message)
        ]
        pieces.append(_Text(chat.end, is_trained=trained))
        if chat.separator:
            pieces.append(_Text(chat.separator, is_trained=False))
    return pieces
