"""The component protocols: what an encoder and a decoder must offer beside ``PreTrainedModel``."""

from __future__ import annotations

from typing import Any

import torch

from omnitrain.data.sample import Features
from omnitrain.ops.loss.cross_entropy import LossTerm

TensorFeatures = dict[str, torch.Tensor]


class ComponentAdapter:
    """The weightless side of a component, used in data workers.

    Attributes:
        modalities: what it handles, of ``image``, ``audio``, ``video``.
        max_frames: frames to read from a video at most.
    """

    modalities: tuple[str, ...] = ()
    max_frames: int = 1

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """One item's features and the number of its rows.

        Args:
            modality: one of :attr:`modalities`.
            media: RGB ``PIL.Image`` (image), ``Waveform`` (audio), list of RGB images (video).

        Raises:
            ValueError: this item cannot be used; the row is skipped.
        """
        raise NotImplementedError


class EncoderMixin:
    """A component that reads media into rows of the foundation's embedding space."""

    def adapter(self) -> ComponentAdapter:
        """The side of this encoder that runs in data workers."""
        raise NotImplementedError

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Rows of all items, in order.

        Args:
            features: the adapter's features, items concatenated along dim 0.
            num_tokens: rows of each item.

        Returns:
            ``[sum(num_tokens), hidden]``.
        """
        raise NotImplementedError

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """The smallest valid ``(features, num_tokens)``, for a rank that takes part without data; asked for once."""
        raise NotImplementedError


class DecoderMixin:
    """A component that writes media: it embeds targets, scores hidden states and turns tokens back into media."""

    def adapter(self) -> ComponentAdapter:
        """The side of this decoder that runs in data workers."""
        raise NotImplementedError

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of target media for the foundation's input, and their labels.

        Args:
            features: the adapter's features, items concatenated along dim 0.
            num_tokens: tokens of each item.

        Returns:
            ``[sum(num_tokens), hidden]`` embeddings and ``[sum(num_tokens)]`` int64 labels.
        """
        raise NotImplementedError

    def lm_head(self, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerm:
        """Loss of predicting ``labels`` ``[n]`` from the hidden states before them, ``[n, hidden]``."""
        raise NotImplementedError

    def lm_embed(self, hidden: torch.Tensor, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of generation.

        Args:
            hidden: ``[batch, hidden]``, the states that predict the next token.
            sample: ``logits [batch, classes] -> tokens [batch]``.

        Returns:
            Embeddings ``[batch, hidden]`` of the drawn tokens, and the tokens ``[batch]`` int64.
        """
        raise NotImplementedError

    def is_complete(self, tokens: list[int]) -> bool:
        """Whether the item that ``tokens`` spell has come to its length or end."""
        raise NotImplementedError

    def lm_generate(self, tokens: list[int]) -> Any:
        """The medium that ``tokens`` spell: a ``PIL.Image`` or a ``Waveform``."""
        raise NotImplementedError

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """The smallest valid ``(features, num_tokens)``, for a rank that takes part without data; asked for once."""
        raise NotImplementedError


def to_tensors(features: Features) -> TensorFeatures:
    """Features of the data side as tensors."""
    return {name: torch.from_numpy(array) for name, array in features.items()}


def one_item(adapter: ComponentAdapter, modality: str, media: Any) -> tuple[TensorFeatures, tuple[int, ...]]:
    """A prepared item, as components take it: ``(features, num_tokens)``."""
    features, number = adapter.prepare(modality, media)
    return to_tensors(features), (number,)
