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
from omnitrain.data.parts import MediaPart, Message, content_parts, is_trained, media_parts
from omnitrain.data.renderer import Encoded, single_token
from omnitrain.data.rows import Row
from omnitrain.data.sample import MediaSpan
from omnitrain.data.text_tokenizer import TextEncoder
from omnitrain.data.tool_calls import tools_of
from omnitrain.data.turns import MORE_FIELDS
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat


@dataclass(frozen=True)
class _Text:
    text: str
    is_trained: bool
    is_format: bool = True  # of the chat format, which alone may write control tokens


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
        self._ids: dict[tuple[str, bool], list[int]] = {}
        texts = (getattr(chat, name) for name in type(chat).model_fields if name != "separator")
        self._encode_text = TextEncoder(tokenizer, texts)

    def start_token(self, modality: str) -> int:
        """See :meth:`Renderer.start_token`."""
        return single_token(self.tokenizer, modality, getattr(self.chat, modality))

    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Encoded:
        """See :meth:`Renderer.encode`."""
        if tools_of(row.tools):
            raise UserError(
                "the row has `tools`, for which a chat format of one's own has no place; name a processor whose chat "
                "template writes them (data.processor), or a column that does not exist (`columns.tools`)"
            )
        pieces = _render(messages, self.chat)
        if for_generation:
            pieces.append(_Text(self.chat.assistant, is_trained=False))
        ids: list[int] = []
        trained: list[bool] = []
        spans: list[MediaSpan] = []
        for piece in pieces:
            if isinstance(piece, MediaPart):
                new = self._token_ids(_Text(getattr(self.chat, piece.modality), piece.is_target))
                name, item = media.prepare(row, piece)
                spans.append(MediaSpan(name, len(ids) + 1, item, piece.is_target))
                ids += new + new * item.num_tokens
                trained += [piece.is_target] + [False] * item.num_tokens
            else:
                new = self._token_ids(piece)
                ids += new
                trained += [piece.is_trained] * len(new)
        return Encoded(
            input_ids=np.array(ids, dtype=np.int64),
            loss_mask=np.array(trained, dtype=bool),
            position_ids=np.arange(len(ids), dtype=np.int64),
            spans=tuple(spans),
        )

    def _token_ids(self, piece: _Text) -> list[int]:
        known = self._ids.get((piece.text, piece.is_format))
        if known is None:
            known = self._encode_format(piece.text) if piece.is_format else self._encode_text(piece.text)
            if len(piece.text) <= 64 and len(self._ids) < 10_000:
                self._ids[piece.text, piece.is_format] = known
        return known

    def _encode_format(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """See :meth:`Renderer.save_pretrained`."""
        self.tokenizer.save_pretrained(str(folder))
        return {"chat": self.chat.model_dump()}


def _render(messages: list[Message], chat: ChatFormat) -> list[_Text | MediaPart]:
    """Messages as an alternation of text and media; assistant content and its ``end`` are trained on.

    Raises:
        UserError: what the format has no place for.
        ValueError: a weight that cannot be honoured.
    """
    pieces: list[_Text | MediaPart] = []
    media = iter(media_parts(messages))
    for message in messages:
        opening = getattr(chat, message["role"], None) if message["role"] in ("system", "user", "assistant") else None
        if opening is None:
            raise UserError(
                f"message role {message['role']!r}: expected system, user or assistant; other roles need a processor "
                "whose chat template writes them (data.processor)"
            )
        if said := [name for name in MORE_FIELDS if message.get(name)]:
            raise UserError(
                f"a message has {said}, for which a chat format of one's own has no place; name a processor whose chat "
                "template writes them (data.processor), or drop these rows"
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
