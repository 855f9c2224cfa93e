"""The recipe's own chat format: openings, ends and start tokens around texts and media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.attached import AttachedMedia
from omnitrain.data.parts import MediaPart, Message, content_parts, media_parts
from omnitrain.data.renderer import Encoded, single_token
from omnitrain.data.rows import Row
from omnitrain.data.sample import MediaSpan
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat


@dataclass(frozen=True)
class _Text:
    text: str
    is_trained: bool


class ChatRenderer:
    """Conversations in a :class:`ChatFormat`. Every piece is tokenised alone, so that short ones can be remembered.

    Attributes:
        tokenizer: the text tokenizer.
        chat: the format.
        end_token: id of ``chat.end``.
        native_modalities: none.
        refused_modalities: what the foundation would read with another format -> why not with this.
    """

    native_modalities: frozenset[str] = frozenset()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatFormat,
        *,
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Check the end token.

        Args:
            tokenizer: of the foundation.
            chat: the format.
            refused: see :attr:`refused_modalities`.

        Raises:
            UserError: it is not one token of the tokenizer.
        """
        self.tokenizer, self.chat = tokenizer, chat
        self.refused_modalities: Mapping[str, str] = dict(refused)  # can be pickled
        self.end_token = single_token(tokenizer, "end", chat.end)
        self._ids: dict[str, list[int]] = {}

    def start_token(self, modality: str) -> int:
        """See :meth:`Renderer.start_token`."""
        return single_token(self.tokenizer, modality, getattr(self.chat, modality))

    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Encoded:
        """See :meth:`Renderer.encode`."""
        pieces = _render(messages, self.chat)
        if for_generation:
            pieces.append(_Text(self.chat.assistant, is_trained=False))
        ids: list[int] = []
        trained: list[bool] = []
        spans: list[MediaSpan] = []
        for piece in pieces:
            if isinstance(piece, MediaPart):
                new = self._token_ids(getattr(self.chat, piece.modality))
                name, item = media.prepare(row, piece)
                spans.append(MediaSpan(name, len(ids) + 1, item, piece.is_target))
                ids += new + new * item.num_tokens
                trained += [piece.is_target] + [False] * item.num_tokens
            else:
                new = self._token_ids(piece.text)
                ids += new
                trained += [piece.is_trained] * len(new)
        return Encoded(
            input_ids=np.array(ids, dtype=np.int64),
            loss_mask=np.array(trained, dtype=bool),
            position_ids=np.arange(len(ids), dtype=np.int64),
            spans=tuple(spans),
        )

    def _token_ids(self, text: str) -> list[int]:
        known = self._ids.get(text)
        if known is None:
            known = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(text) <= 64 and len(self._ids) < 10_000:
                self._ids[text] = known
        return known

    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """See :meth:`Renderer.save_pretrained`."""
        self.tokenizer.save_pretrained(str(folder))
        return {"chat": self.chat.model_dump()}


def _render(messages: list[Message], chat: ChatFormat) -> list[_Text | MediaPart]:
    """Messages as an alternation of text and media; assistant content and its ``end`` are trained on."""
    pieces: list[_Text | MediaPart] = []
    media = iter(media_parts(messages))
    for message in messages:
        opening = getattr(chat, message["role"], None) if message["role"] in ("system", "user", "assistant") else None
        if opening is None:
            raise UserError(f"message role {message['role']!r}: expected system, user or assistant")
        is_assistant = message["role"] == "assistant"
        pieces.append(_Text(opening, is_trained=False))
        pieces += [
            _Text(part["text"], is_assistant) if part["type"] == "text" else next(media)
            for part in content_parts(message)
        ]
        pieces.append(_Text(chat.end, is_trained=is_assistant))
        if chat.separator:
            pieces.append(_Text(chat.separator, is_trained=False))
    return pieces
