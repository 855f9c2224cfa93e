"""Convert images to latents, a few numbers for each token, and back by frozen models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from omnitrain.data.packing.sample import SEEDS, Features, Grid
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import TensorFeatures, one_item
from omnitrain.models.decoders.media_tokenizers import ImageTargetAdapter, image_of
from omnitrain.recipe.component_configs import PatchCodecConfig


class LatentModel(PreTrainedModel, ABC):
    """A model that encodes images as latents, and decodes them; also the tower of an encoder.

    Attributes:
        stride: side of the square that is one token, pixels.
        num_channels: numbers in a latent.
    """

    def __init__(self, config: Any, stride: int, num_channels: int) -> None:
        """Set the attributes, also of the config."""
        super().__init__(config)
        self.stride, self.num_channels = stride, num_channels
        config.patch_size, config.hidden_size = stride, num_channels

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return latents ``[n, num_channels, rows, columns]`` of pixels ``[n, 3, height, width]`` fp32 in [-1, 1]."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return pixels, as :meth:`encode` takes them, for latents fp32, as it makes them."""

    def forward(self, pixel_values: torch.Tensor) -> BaseModelOutput:
        """Return the latents of images as the features of a tower, ``[n, rows * columns, num_channels]``."""
        return BaseModelOutput(last_hidden_state=self.encode(pixel_values).flatten(2).mT)


class PatchCodec(LatentModel):
    """Patches of pixels in [-1, 1] as latents; nothing is lost, and nothing is learnt."""

    config: PatchCodecConfig
    config_class = PatchCodecConfig

    def __init__(self, config: PatchCodecConfig) -> None:
        """Take the size of the patches."""
        super().__init__(config, config.patch_size, 3 * config.patch_size**2)
        self.post_init()

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """See :class:`LatentModel`."""
        return nn.functional.pixel_unshuffle(pixels, self.stride)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See :class:`LatentModel`."""
        return nn.functional.pixel_shuffle(latents, self.stride)


AutoModel.register(PatchCodecConfig, PatchCodec)


class _LatentTargetAdapter(ImageTargetAdapter):
    """Convert images as their base class, with a seed for the noise of each token."""

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        features, num_tokens = super().prepare(modality, media)
        return features | {SEEDS: np.zeros(num_tokens, dtype=np.int64)}, num_tokens


class ImageLatents:
    """Square images of one size as latents of a model, row by row."""

    modality = "image"

    def __init__(self, model: Any, image_size: int | None, patch_size: int) -> None:
        """``image_size``: side, pixels; ``patch_size``: side of the square of latents that is a token.

        Raises:
            UserError: ``image_size`` is missing, or no multiple of a token's side.
        """
        stride = model.stride * patch_size
        if image_size is None or image_size % stride:
            patches = f" and `patch_size: {patch_size}`" * (patch_size > 1)
            raise UserError(
                f"a decoder of latents needs image_size, a multiple of {stride} for {type(model).__name__}{patches}; "
                f"found {image_size}"
            )
        self.model, self.image_size, self.patch_size = model, image_size, patch_size
        self.side, self.num_channels = image_size // stride, model.num_channels * patch_size**2

    def length(self, tokens: Sequence[Any]) -> int:
        """Return the number of tokens of an item."""
        return int(self.side**2)

    def grid(self, tokens: Sequence[Any]) -> Grid:
        """Return where the tokens of an item stand."""
        return Grid(0, 1, self.side, self.side)

    def adapter(self) -> ImageTargetAdapter:
        """Return the converter from target images to input features."""
        return _LatentTargetAdapter(self.image_size, self.side**2)

    def encode(self, features: TensorFeatures) -> torch.Tensor:
        """Encode ``pixel_values`` ``[n, 3, size, size]`` -> ``[n * side * side, num_channels]`` fp32."""
        latents = nn.functional.pixel_unshuffle(self.model.encode(features["pixel_values"].float()), self.patch_size)
        return latents.permute(0, 2, 3, 1).reshape(-1, self.num_channels).float()

    def decode(self, latents: torch.Tensor) -> Image.Image:
        """Decode ``[side * side, num_channels]`` to an RGB image."""
        grid = latents.view(1, self.side, self.side, self.num_channels).permute(0, 3, 1, 2)
        return image_of(self.model.decode(nn.functional.pixel_shuffle(grid, self.patch_size))[0])

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the features of a black image."""
        return one_item(self.adapter(), "image", Image.new("RGB", (1, 1)))
