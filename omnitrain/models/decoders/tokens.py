"""``TokenDecoder`` generates a modality as the discrete tokens of a frozen media tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnitrain.models.components.protocols import Draw, TensorFeatures
from omnitrain.models.decoders.codec_decoder import CodecDecoder
from omnitrain.models.decoders.media_tokenizers import MediaTokenizer, media_tokenizer, settings_of
from omnitrain.ops.loss.cross_entropy import cross_entropy_rows, linear_cross_entropy
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.ops.loss.token_functions import TokenFunction
from omnitrain.recipe.component_configs import TokenDecoderConfig


class TokenDecoder(CodecDecoder):
    """An embedding and a head for a media tokenizer's codes.

    Items without a fixed length (sound) end with an extra class, the end token, which is predicted and fed back.
    """

    config_class = TokenDecoderConfig
    loss_backend = "auto"  # of linear_cross_entropy, as the next two
    loss_function: TokenFunction | None = None
    token_metrics: Mapping[str, TokenFunction] = MappingProxyType({})

    def __init__(
        self,
        config: TokenDecoderConfig,
        tokenizer: PreTrainedModel | None = None,
        embedding: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """``tokenizer``: a media tokenizer with weights; None: one with random weights.

        ``embedding``: codes to ``[..., hidden]``; ``head``: hidden states to logits of the codes; None: fresh ones.
        """
        super().__init__(config, tokenizer)
        classes = self.codec.num_codes + self._has_ends
        self.embedding = nn.Embedding(classes, config.hidden_size) if embedding is None else embedding
        self.head = nn.Linear(config.hidden_size, classes, bias=False) if head is None else head
        self.post_init()

    @cached_property
    def codec(self) -> MediaTokenizer:
        """The :class:`MediaTokenizer` for the HF model."""
        config = self.config
        return media_tokenizer(self.tokenizer, config.image_size, config.num_codebooks, config.image_sizes or ())

    @property
    def settings(self) -> set[str]:
        """See :class:`CodecDecoder`."""
        return settings_of(self.codec)

    @property
    def _has_ends(self) -> bool:
        return self.codec.length(()) is None

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings ``[sum(num_tokens), hidden]``, and labels; ValueError: codes for other numbers."""
        with torch.no_grad():
            labels = self._with_ends(self.codec.encode(features, num_tokens), num_tokens)
        return self.embedding(labels), labels

    def _with_ends(self, codes: torch.Tensor, num_tokens: tuple[int, ...]) -> torch.Tensor:
        ends = len(num_tokens) if self._has_ends else 0
        if codes.numel() + ends != sum(num_tokens):
            raise ValueError(
                f"{type(self.tokenizer).__name__} gave {codes.numel()} codes for {sum(num_tokens) - ends} placeholders"
            )
        if not ends:
            return codes
        end = codes.new_full((1,), self.codec.num_codes)
        items = codes.split([count - 1 for count in num_tokens])
        return torch.cat([tensor for item in items for tensor in (item, end)])

    def lm_head(self, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerm:
        """Return the cross entropy of ``labels`` ``[n]``, predicted from hidden states ``[n, hidden]``."""
        options: dict[str, Any] = {
            "count": labels.numel(),
            "function": self.loss_function,
            "metrics": self.token_metrics,
        }
        if isinstance(self.head, nn.Linear):
            return linear_cross_entropy(hidden, self.head.weight, labels, backend=self.loss_backend, **options)
        return cross_entropy_rows(self.head(hidden), labels, **options)

    def lm_embed(self, hidden: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the next token of each sequence and embed it (see :class:`DecoderMixin`)."""
        tokens = draw(self.head(hidden[:, -1]).float())
        return self.embedding(tokens)[:, None], tokens[:, None]

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether an item has its length, or ends with the end token, or has ``max_tokens`` tokens."""
        if not self._has_ends:
            return super().is_complete(tokens)
        return bool(tokens) and (tokens[-1] == self.codec.num_codes or len(tokens) >= self.config.max_tokens)

    def next_classes(self, tokens: list[int], size: str | None) -> range | None:
        """See :class:`DecoderMixin`: of an image of several sizes, its size comes first, and nowhere else."""
        next_codes = getattr(self.codec, "next_codes", super().next_classes)
        allowed: range | None = next_codes(tokens, size)
        return allowed

    def lm_generate(self, tokens: list[int]) -> Any:
        """Decode ``tokens`` to a ``PIL.Image``, ``Waveform`` or ``Clip``; an end token is ignored."""
        codes = [token for token in tokens if token < self.codec.num_codes]
        return self.decoded(torch.tensor(codes, dtype=torch.long, device=next(self.head.parameters()).device))
