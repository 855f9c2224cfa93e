"""The component protocols: methods that an encoder and a decoder add to ``PreTrainedModel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch

from omnitrain.data.packing.sample import Features, Grid
from omnitrain.data.render.component_media import ComponentAdapter as ComponentAdapter
from omnitrain.errors import UserError
from omnitrain.ops.loss.linear import LossTerm

TensorFeatures = dict[str, torch.Tensor]


class ComponentMixin:
    """A component that reads media."""

    def adapter(self) -> ComponentAdapter:
        """Return the converter from media to input features, for data workers."""
        raise NotImplementedError

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the smallest valid ``(features, num_tokens)``, for a rank without data; called once."""
        raise NotImplementedError


class EncoderMixin(ComponentMixin):
    """A component that encodes media as features in the foundation's embedding space."""

    is_teacher: ClassVar[bool] = False  # it encodes tokens instead, as rows that losses read (``Teacher``)

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode items, concatenated along dim 0, with ``num_tokens`` features each: ``[sum(num_tokens), hidden]``."""
        raise NotImplementedError

    def lm_tower(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> TensorFeatures:
        """Return what :meth:`lm_project` needs; an encoder that has both can have its tower on ranks of its own.

        Returns name -> ``[sum(num_tokens), ...]``. ``main`` comes first: ``[sum(num_tokens), width]`` of the tower.
        """
        raise NotImplementedError

    def lm_project(self, rows: TensorFeatures) -> torch.Tensor:
        """Return the features ``[n, hidden]`` for ``rows`` of :meth:`lm_tower`; each from its row alone."""
        raise NotImplementedError

    def minimal_rows(self) -> TensorFeatures:
        """Return the smallest ``rows`` for :meth:`lm_project`, for a rank without data."""
        raise NotImplementedError


Token = int | list[float]
"""One token of a medium: a code, or the channels of a latent."""


class Draw(Protocol):
    """Draws the next token of ``n`` sequences, with the sampling that is asked for.

    With guidance, ``copies`` is 2: states without the condition follow those with it. Else it is 1. The random numbers
    of a sequence depend on the seed and its number alone.
    """

    state: Any  # what the decoder keeps from one call to the next; at first None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return tokens ``[copies * n]`` int64 for logits ``[copies * n, classes]``."""

    def guided(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``u + guidance * (c - u)``, ``[n, ...]``, of ``c`` and ``u``, ``[copies * n, ...]``."""

    def noise(self, width: int) -> torch.Tensor:
        """Return fresh standard normal numbers ``[n, width]`` fp32."""


class MediaWriter(Protocol):
    """What generation needs of a medium that is written: a decoder, or words of the foundation's vocabulary."""

    def is_complete(self, tokens: Sequence[Any]) -> bool:
        """Whether ``tokens`` (each a :data:`Token`) are a complete item."""

    def next_classes(self, tokens: list[Any], size: str | None) -> range | torch.Tensor | None:
        """Return classes after ``tokens`` of an item, a range or ``[n]`` int64; None: all.

        Raises UserError: it cannot write ``size`` (``320x192``).
        """

    def grid(self, tokens: Sequence[Any]) -> Grid | None:
        """Return where the tokens of an item that begins with ``tokens`` stand; None: one after the other."""

    def lm_generate(self, tokens: list[Any]) -> Any:
        """Decode ``tokens`` to a ``PIL.Image``, a ``Waveform``, or a ``Clip`` of a film."""


class DecoderMixin(ComponentMixin):
    """A component that generates media: it embeds targets, predicts tokens from hidden states, and decodes tokens."""

    unused_sampling: ClassVar[frozenset[str]] = frozenset()  # keys of ``Sampling`` without an effect on it
    token_metrics: Mapping[str, Any] = MappingProxyType({})  # by name: the metrics of the losses of :meth:`lm_head`

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings ``[sum(num_tokens), hidden]`` of target media for the foundation's input.

        And their labels, ``[sum(num_tokens), ...]`` of any dtype: codes, or floats, to which no gradient goes.
        Items are concatenated along dim 0, with ``num_tokens`` each. Random numbers must be functions of the ``seeds``
        of items (:data:`~omnitrain.data.packing.sample.SEEDS`, :mod:`omnitrain.ops.draws`), so that any ranks draw the
        same ones; those that the loss needs belong to the labels.
        """
        raise NotImplementedError

    def lm_head(self, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerm:
        """Return the loss of predicting ``labels`` ``[n, ...]`` from the hidden states before them, ``[n, hidden]``."""
        raise NotImplementedError

    def minimal_labels(self) -> torch.Tensor:
        """Return labels of one token, for a rank without targets."""
        return torch.zeros(1, dtype=torch.long)

    def lm_embed(self, hidden: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw the next ``k`` tokens of each sequence from the states that predict them, ``[copies * n, 1, hidden]``.

        Returns embeddings ``[n, k, hidden]`` of the drawn tokens, and the tokens: codes ``[n, k]`` int64, or values
        ``[n, k, channels]``; rows after the first ``n`` are not used. A decoder of blocks (``is_block`` of its adapter)
        draws an item as a whole. For None in place of tokens the foundation runs over the embeddings, after the
        sequences, and the decoder gets their states ``[copies * n, k, hidden]``, until it returns the tokens.
        """
        raise NotImplementedError

    def is_complete(self, tokens: Sequence[Any]) -> bool:
        """See :class:`MediaWriter`, also for the next methods."""
        raise NotImplementedError

    def next_classes(self, tokens: list[Any], size: str | None) -> range | None:
        """Return None; UserError: ``size`` is given."""
        if size is not None:
            raise UserError(f"size {size!r}: {type(self).__name__} writes one size alone; leave it out")
        return None

    def grid(self, tokens: Sequence[Any]) -> Grid | None:
        """Return None."""
        return None

    def lm_generate(self, tokens: list[Any]) -> Any:
        """See :class:`MediaWriter`."""
        raise NotImplementedError


def to_tensors(features: Features) -> TensorFeatures:
    """Convert numpy features to tensors."""
    return {name: torch.from_numpy(array) for name, array in features.items()}


def one_item(adapter: ComponentAdapter, modality: str, media: Any) -> tuple[TensorFeatures, tuple[int, ...]]:
    """Prepare one item as the input of a component: ``(features, num_tokens)``."""
    features, num_tokens = adapter.prepare(modality, media)
    return to_tensors(features), (num_tokens,)
