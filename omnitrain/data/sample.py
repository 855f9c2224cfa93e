"""``Sample``: one training example, everything about it decided before it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

Features = dict[str, np.ndarray]

# Component names of modalities that the foundation reads by itself: ``foundation.image``, ...
NATIVE_PREFIX = "foundation."


@dataclass(frozen=True)
class MediaItem:
    """One image, clip or video, ready for its component.

    Attributes:
        features: arrays by the component's argument names; items of a pack are concatenated along axis 0.
        num_tokens: rows that the component makes of it, so also its tokens in the sequence.
    """

    features: Features
    num_tokens: int


@dataclass(frozen=True)
class MediaSpan:
    """An item's place in a sample. Atomic: never cut by truncation or packing.

    Attributes:
        component: name of the encoder that reads it, or of the decoder that learns to write it. A modality that the
            foundation reads by itself is ``foundation.image``, ``foundation.audio`` or ``foundation.video``.
        start: index of its first token in the sample.
        item: the prepared media.
        is_target: True for decoders: the span's tokens are predicted.
        scattered: ``[num_tokens]`` int64 indices of its tokens, ascending, where other tokens lie between them (times
            between a video's frames, sound among its pictures); None: one run from ``start``.
    """

    component: str
    start: int
    item: MediaItem
    is_target: bool
    scattered: np.ndarray | None = None

    @property
    def positions(self) -> np.ndarray:
        """``[num_tokens]`` int64: index in the sample of the token of each of the item's rows."""
        if self.scattered is not None:
            return self.scattered
        return np.arange(self.start, self.start + self.item.num_tokens)


@dataclass(frozen=True)
class Sample:
    """Token ids, what is trained on, positions and media of one example.

    Its length is the number of tokens that the model is given.

    Attributes:
        id: names the row in errors and reports.
        source: metrics are split by it.
        input_ids: ``[T]`` int64; arbitrary under media spans.
        loss_mask: ``[T]`` bool; True where the text token itself is to be predicted.
        position_ids: ``[T]`` int64, or ``[axes, T]`` for a foundation with several position axes (M-RoPE).
        spans: media, in order of ``start``.
        index: position in the global data order; negative: it stands in for no sample of the data.
        token_inputs: further arguments of the foundation's forward with one value per token, ``[T]`` each
            (``mm_token_type_ids``, ``token_type_ids``).
        forward_inputs: of a sample that the foundation reads in its own forward, alone: all that its HF processor gave
            beside the ids, batch axis included. Positions are then the model's own.
        num_inputs: how many tokens, from the first on, the model is given; None: all. One behind them is a label at
            most.
    """

    id: str
    source: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    spans: tuple[MediaSpan, ...] = ()
    index: int = 0
    token_inputs: dict[str, np.ndarray] = field(default_factory=dict)
    forward_inputs: Features = field(default_factory=dict)
    num_inputs: int | None = None

    @property
    def is_alone(self) -> bool:
        """No other sample may be in its pack."""
        return bool(self.forward_inputs)

    def __len__(self) -> int:
        return len(self.input_ids) if self.num_inputs is None else self.num_inputs

    def without_tail(self) -> Sample:
        """The same sample, of which the model is given nothing behind the last token that a loss reads.

        Media are given whole, and so is all that a processor gave for all tokens. For a causal model it changes neither
        a loss nor a gradient.
        """
        if self.forward_inputs:
            return self
        media = [int(span.positions.max(initial=0)) + 1 for span in self.spans]
        trained = np.flatnonzero(self.loss_mask)[-1:].tolist()  # it is read one token before
        return replace(self, num_inputs=max([1, *media, *trained]))


@dataclass(frozen=True)
class Rejected:
    """A row that could not become a sample: skipped, counted and listed.

    Attributes:
        id: names the row.
        source: metrics are split by it.
        reason: what was found.
        index: position in the global data order.
        is_overlong: a whole sample, but longer than a pack.
    """

    id: str
    source: str
    reason: str
    index: int = 0
    is_overlong: bool = False
