"""The interface of the two kinds of chat format, which turn conversations into tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.parts import Message
from omnitrain.data.packing.sample import Features, MediaSpan
from omnitrain.data.render.component_media import AttachedMedia
from omnitrain.data.render.hf_visuals import FrameChoice
from omnitrain.data.sources.media import MediaFile
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """The tokens of a conversation; shapes as in :class:`Sample`."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    spans: tuple[MediaSpan, ...]
    token_inputs: dict[str, np.ndarray] = field(default_factory=dict)
    forward_inputs: Features = field(default_factory=dict)


class Renderer(Protocol):
    """A chat format: that of the recipe (:class:`ChatRenderer`), or a HF template (:class:`TemplateRenderer`).

    Attributes:
        tokenizer: the text tokenizer.
        end_token: id of the token that ends an assistant's message.
        native_modalities: modalities that the foundation reads natively.
        refused_modalities: modality that the foundation could read, but not here -> why.
        reads: further keys of messages and parts that may change the text.
    """

    tokenizer: PreTrainedTokenizerBase
    end_token: int
    native_modalities: frozenset[str]
    refused_modalities: Mapping[str, str]
    reads: frozenset[str]

    def start_token(self, modality: str) -> int:
        """Return the id of the token before a medium that an attached component reads or writes.

        Raises:
            UserError: it is not one token of the tokenizer.
        """
        ...

    def encode(self, row: Row, messages: list[Message], media: AttachedMedia, *, for_generation: bool) -> Encoded:
        """Encode ``messages`` with the media of ``row``; for generation, append the opening of an assistant message.

        Raises:
            ValueError: this row cannot be used.
            UserError: no such row can be used.
        """
        ...

    def frame_choice(self, file: MediaFile) -> FrameChoice:
        """Return how the foundation's processor chooses the frames of a video."""
        ...

    def encode_text(self, ids: list[int]) -> Encoded:
        """Encode the tokens of a text without media; all of them are trained."""
        ...

    def save_pretrained(self, folder: Path) -> dict[str, Any]:
        """Save the tokenizer (or processor) to ``folder``. Return the settings that its files do not contain."""
        ...


def single_token(tokenizer: PreTrainedTokenizerBase, field_name: str, text: str) -> int:
    """Return the id of ``text``.

    Raises:
        UserError: it is not one token of the tokenizer.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise UserError(
            f"data.chat.{field_name}: {text!r} must be one token, but the tokenizer gives {len(ids)}: {ids}"
        )
    return int(ids[0])
