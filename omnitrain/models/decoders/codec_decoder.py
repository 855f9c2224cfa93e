"""``CodecDecoder``: what decoders share whose targets come from a frozen media tokenizer; films."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.sample import Features, Grid
from omnitrain.data.sources.clips import Clip
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, DecoderMixin, TensorFeatures, one_item
from omnitrain.models.hf.load import as_config, model_class
from omnitrain.transformers_private import ContainerModel


class FilmAdapter(ComponentAdapter):
    """Convert films of one number of frames, each frame as an image."""

    modalities = ("video",)

    def __init__(self, frames: ComponentAdapter, num_frames: int) -> None:
        """``frames``: the adapter of images."""
        self.frames, self.is_block = frames, frames.is_block
        self.num_frames = self.max_frames = num_frames

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return the features of the frames and their tokens; a film of fewer frames repeats some."""
        places = np.linspace(0, len(media) - 1, self.max_frames).round().astype(int).tolist()
        prepared = [self.frames.prepare("image", media[place]) for place in places]
        features = {name: np.concatenate([of_frame[name] for of_frame, _ in prepared]) for name in prepared[0][0]}
        return features, sum(num_tokens for _, num_tokens in prepared)

    def grid(self, features: Features) -> Grid | None:
        """Return the grid of all frames."""
        of_frame = self.frames.grid(features)
        return of_frame and of_frame._replace(frames=self.max_frames)


class CodecDecoder(ContainerModel, DecoderMixin):
    """A decoder whose tokens are codes or latents of a frozen media tokenizer.

    With ``num_frames`` in its config, an item is a film, and its tokens are those of its frames, one after the other.
    """

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedModel | None = None) -> None:
        """``tokenizer``: a media tokenizer with weights; None: one with random weights."""
        super().__init__(config)
        tokenizer_config = as_config(config.tokenizer or {})
        self.tokenizer = tokenizer if tokenizer is not None else model_class(tokenizer_config)(tokenizer_config)
        self.tokenizer.requires_grad_(False)
        if self.num_frames and (self.codec.modality != "image" or getattr(config, "image_sizes", None)):
            raise UserError(
                f"num_frames: the frames of a film are images of one size, `image_size`, but this decoder writes "
                f"{'images of several sizes' if self.codec.modality == 'image' else self.codec.modality}; leave "
                "num_frames out"
            )

    @property
    def num_frames(self) -> int | None:
        """Frames of a film; None: an item is no film."""
        frames: int | None = self.config.num_frames
        return frames

    @cached_property
    def codec(self) -> Any:
        """What converts media to tokens and back by the tokenizer."""
        raise NotImplementedError

    @property
    def settings(self) -> set[str]:
        """The keys of a recipe's decoder that it uses, besides ``tokenizer``."""
        raise NotImplementedError

    @property
    def modality(self) -> str:
        """``image``, ``audio`` or ``video``."""
        modality: str = "video" if self.num_frames else self.codec.modality
        return modality

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the frozen media tokenizer stays in evaluation mode."""
        super().train(mode)
        self.tokenizer.eval()
        return self

    def adapter(self) -> ComponentAdapter:
        """Return the converter from target media to input features, for data workers."""
        adapter: ComponentAdapter = self.codec.adapter()
        return FilmAdapter(adapter, self.num_frames) if self.num_frames else adapter

    def is_complete(self, tokens: Sequence[Any]) -> bool:
        """Whether an item has its length."""
        length = self.codec.length(tokens)
        return length is not None and len(tokens) >= length * (self.num_frames or 1)

    def grid(self, tokens: Sequence[Any]) -> Grid | None:
        """See :class:`DecoderMixin`."""
        of_codec: Grid | None = self.codec.grid(tokens) if hasattr(self.codec, "grid") else None
        return of_codec if of_codec is None else of_codec._replace(frames=self.num_frames or 1)

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the features of a black image or film, or of the shortest silent clip."""
        if self.num_frames:
            return one_item(self.adapter(), "video", [Image.new("RGB", (1, 1))] * self.num_frames)
        features, num_tokens = self.codec.minimal_input()
        return features, num_tokens

    @torch.no_grad()
    def decoded(self, tokens: torch.Tensor) -> Any:
        """Return the ``PIL.Image``, ``Waveform`` or ``Clip`` of an item's tokens ``[n, ...]``."""
        if not self.num_frames:
            return self.codec.decode(tokens)
        frames, fps = [self.codec.decode(frame) for frame in tokens.chunk(self.num_frames)], self.config.fps
        return Clip(frames, tuple(place / fps for place in range(len(frames))), len(frames), len(frames) / fps)
