"""Rows -> samples: chat rendering, tokenising, media preparation. Runs in the data workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from omnitrain.data.media import decode_audio, decode_image, decode_video
from omnitrain.data.rows import MODALITIES, Row
from omnitrain.data.sample import Features, MediaItem, MediaSpan, Rejected, Sample
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat

_SETTINGS_FILE = "omni_processor.json"


class MediaAdapter(Protocol):
    """What a component offers to the data side: media in, its forward's arguments out; no weights."""

    modalities: tuple[str, ...]
    max_frames: int

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Features of one item (arrays that concatenate along axis 0) and the rows the component makes of it."""
        ...


@dataclass(frozen=True)
class _Text:
    text: str
    is_trained: bool


@dataclass(frozen=True)
class _Media:
    modality: str
    position: int
    is_target: bool


class OmniProcessor:
    """Tokenizer, chat format and the media side of every component.

    Attributes:
        tokenizer: the text tokenizer.
        chat: the chat format.
        readers: encoder name -> adapter.
        writers: decoder name -> adapter.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatFormat,
        readers: Mapping[str, MediaAdapter],
        writers: Mapping[str, MediaAdapter],
    ) -> None:
        """Check that each modality has one reader and one writer at most, and one start token.

        Raises:
            UserError: two components for one modality, or a start token that is not one token of the vocabulary.
        """
        self.tokenizer = tokenizer
        self.chat = chat
        self.readers = _by_modality("encoders", readers)
        self.writers = _by_modality("decoders", writers)
        self._ids: dict[str, list[int]] = {}
        self.end_token = self._single_token("end", chat.end)
        used = [m for m in MODALITIES if m in self.readers or m in self.writers]
        self.start_tokens = {m: self._single_token(m, getattr(chat, m)) for m in used}

    def _single_token(self, field: str, text: str) -> int:
        ids = self.token_ids(text)
        if len(ids) != 1:
            raise UserError(f"data.chat.{field}: {text!r} must be one token of the tokenizer, found {len(ids)}: {ids}")
        return ids[0]

    def token_ids(self, text: str) -> list[int]:
        """Ids of ``text`` alone, without tokens added around it. Short texts are remembered."""
        known = self._ids.get(text)
        if known is None:
            known = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(text) <= 64 and len(self._ids) < 10_000:
                self._ids[text] = known
        return known

    def sample(self, row: Row, index: int = 0, max_tokens: int | None = None) -> Sample | Rejected:
        """The training sample of a row; a damaged or overlong row comes back as :class:`Rejected`.

        Raises:
            UserError: the row asks for something the model cannot do at all (a modality without a component).
        """
        return self._try(row, row.messages, [], index, max_tokens)

    def prompt(self, row: Row, index: int = 0) -> Sample | Rejected:
        """Everything before the last assistant message's content: what generation starts from."""
        messages = row.messages
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self._try(row, messages, [_Text(self.chat.assistant, is_trained=False)], index, None)

    def _try(
        self, row: Row, messages: list[dict[str, Any]], ending: list[_Text], index: int, max_tokens: int | None
    ) -> Sample | Rejected:
        try:
            pieces = [*_render(messages, self.chat), *ending]
        except (TypeError, KeyError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            reason = (
                f"malformed messages ({problem}): expected a list of role and content, as text or as parts with type"
            )
            return Rejected(row.id, row.source, reason, index)
        self._check_modalities(row, pieces)
        try:
            sample = self._assemble(row, pieces, index)
        except ValueError as error:
            return Rejected(row.id, row.source, str(error), index)
        if max_tokens is not None and len(sample) > max_tokens:
            reason = f"{len(sample)} tokens, at most {max_tokens} fit into a pack"
            return Rejected(row.id, row.source, reason, index, is_overlong=True)
        return sample

    def _check_modalities(self, row: Row, pieces: list[_Text | _Media]) -> None:
        for piece in pieces:
            if isinstance(piece, _Media) and piece.modality not in (self.writers if piece.is_target else self.readers):
                verb, kind = ("write", "decoders") if piece.is_target else ("read", "encoders")
                able = sorted(self.writers if piece.is_target else self.readers)
                raise UserError(
                    f"row {row.id!r} of {row.source!r} asks the model to {verb} {piece.modality}, and it can {verb} "
                    f"{able or 'no media'}; add a component for it to model.{kind}, or drop these rows"
                )

    def _assemble(self, row: Row, pieces: list[_Text | _Media], index: int) -> Sample:
        ids: list[int] = []
        trained: list[bool] = []
        spans: list[MediaSpan] = []
        for piece in pieces:
            if isinstance(piece, _Media):
                new = [self.start_tokens[piece.modality]]
                span = self._span(row, piece, start=len(ids) + 1)
                spans.append(span)
                ids += new + new * span.item.num_tokens
                trained += [piece.is_target] + [False] * span.item.num_tokens
            else:
                new = self.token_ids(piece.text)
                ids += new
                trained += [piece.is_trained] * len(new)
        return Sample(
            id=row.id,
            source=row.source,
            input_ids=np.array(ids, dtype=np.int64),
            loss_mask=np.array(trained, dtype=bool),
            position_ids=np.arange(len(ids), dtype=np.int64),
            spans=tuple(spans),
            index=index,
        )

    def _span(self, row: Row, piece: _Media, start: int) -> MediaSpan:
        name, adapter = (self.writers if piece.is_target else self.readers)[piece.modality]
        media = _decode(piece.modality, row.media_bytes(piece.modality, piece.position), adapter.max_frames)
        features, num_tokens = adapter.prepare(piece.modality, media)
        return MediaSpan(name, start, MediaItem(features, num_tokens), piece.is_target)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer and the chat format into ``folder`` (components save themselves with the model)."""
        self.tokenizer.save_pretrained(str(folder))
        Path(folder, _SETTINGS_FILE).write_text(json.dumps({"chat": self.chat.model_dump()}, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, readers: Mapping[str, MediaAdapter], writers: Mapping[str, MediaAdapter]
    ) -> OmniProcessor:
        """Read what :meth:`save_pretrained` wrote; adapters come from ``model.media_adapters()``.

        Raises:
            UserError: ``folder`` holds no omni processor.
        """
        settings = Path(folder, _SETTINGS_FILE)
        if not settings.is_file():
            raise UserError(f"{settings} is missing: {folder} is not a checkpoint that omnitrain saved")
        chat = ChatFormat(**json.loads(settings.read_text())["chat"])
        return cls(AutoTokenizer.from_pretrained(str(folder)), chat, readers, writers)


def _by_modality(kind: str, adapters: Mapping[str, MediaAdapter]) -> dict[str, tuple[str, MediaAdapter]]:
    owners: dict[str, tuple[str, MediaAdapter]] = {}
    for name, adapter in adapters.items():
        for modality in adapter.modalities:
            if modality in owners:
                raise UserError(f"model.{kind}: {owners[modality][0]!r} and {name!r} both handle {modality}; keep one")
            owners[modality] = (name, adapter)
    return owners


def _render(messages: list[dict[str, Any]], chat: ChatFormat) -> list[_Text | _Media]:
    """Messages as an alternation of text and media; assistant content and its ``end`` are trained on."""
    pieces: list[_Text | _Media] = []
    seen = dict.fromkeys(MODALITIES, 0)
    for message in messages:
        opening = getattr(chat, message["role"], None) if message["role"] in ("system", "user", "assistant") else None
        if opening is None:
            raise UserError(f"message role {message['role']!r}: expected system, user or assistant")
        is_assistant = message["role"] == "assistant"
        pieces.append(_Text(opening, is_trained=False))
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                pieces.append(_Text(part["text"], is_trained=is_assistant))
            elif part["type"] in MODALITIES:
                pieces.append(_Media(part["type"], seen[part["type"]], is_target=is_assistant))
                seen[part["type"]] += 1
            else:
                raise UserError(f"content part of type {part['type']!r}: expected text, {', '.join(MODALITIES)}")
        pieces.append(_Text(chat.end, is_trained=is_assistant))
        if chat.separator:
            pieces.append(_Text(chat.separator, is_trained=False))
    return pieces


def _decode(modality: str, data: bytes, max_frames: int) -> Any:
    if modality == "image":
        return decode_image(data)
    if modality == "audio":
        return decode_audio(data)
    return decode_video(data, max_frames)
