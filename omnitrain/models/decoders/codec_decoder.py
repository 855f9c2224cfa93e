"""``CodecDecoder``: what decoders share whose targets come from a frozen media tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.components.protocols import ComponentAdapter, DecoderMixin, TensorFeatures
from omnitrain.models.hf.load import as_config, model_class
from omnitrain.transformers_private import ContainerModel


class CodecDecoder(ContainerModel, DecoderMixin):
    """A decoder whose tokens are codes or latents of a frozen media tokenizer."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedModel | None = None) -> None:
        """``tokenizer``: a media tokenizer with weights; None: one with random weights."""
        super().__init__(config)
        tokenizer_config = as_config(config.tokenizer or {})
        self.tokenizer = tokenizer if tokenizer is not None else model_class(tokenizer_config)(tokenizer_config)
        self.tokenizer.requires_grad_(False)

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
        """``image`` or ``audio``."""
        modality: str = self.codec.modality
        return modality

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the frozen media tokenizer stays in evaluation mode."""
        super().train(mode)
        self.tokenizer.eval()
        return self

    def adapter(self) -> ComponentAdapter:
        """Return the converter from target media to input features, for data workers."""
        adapter: ComponentAdapter = self.codec.adapter()
        return adapter

    def is_complete(self, tokens: Sequence[Any]) -> bool:
        """Whether an item has its length."""
        length = self.codec.length(tokens)
        return length is not None and len(tokens) >= length

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the features of a black image, or of the shortest silent clip."""
        features, num_tokens = self.codec.minimal_input()
        return features, num_tokens
