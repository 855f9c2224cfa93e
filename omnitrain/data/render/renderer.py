"""The interface of the two kinds of chat format, which turn conversations into samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.parts import Message
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.component_media import AttachedMedia
from omnitrain.data.render.hf_visuals import FrameChoice
from omnitrain.data.sources.media import MediaFile
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat


class Renderer(ABC):
    """A chat format: that of the recipe (:class:`ChatRenderer`), or a HF template (:class:`TemplateRenderer`).

    Attributes:
        tokenizer: the text tokenizer.
        chat: the format, or the start tokens of attached media.
        end_token: id of the token that ends an assistant's message.
        native_modalities: modalities that the foundation reads natively.
        refused_modalities: modality that the foundation could read, but not here -> why.
        reads: further keys of messages and parts that may change the text.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    end_token: int
    native_modalities: frozenset[str] = frozenset()
    refused_modalities: Mapping[str, str]
    reads: frozenset[str] = frozenset()

    def start_token(self, modality: str) -> int:
        """Return the id of the token before a medium that an attached component reads or writes.

        Raises:
            UserError: it is not one token of the tokenizer.
        """
        return single_token(self.tokenizer, modality, getattr(self.chat, modality))

    @abstractmethod
    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Sample:
        """Encode ``messages`` with the media of ``row``; for generation, append the opening of an assistant message.

        Raises:
            ValueError: this row cannot be used.
            UserError: no such row can be used.
        """

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
