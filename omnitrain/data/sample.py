"""``Sample``: one training example, everything about it decided before it is packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Features = dict[str, np.ndarray]


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
        component: name of the encoder that reads it, or of the decoder that learns to write it.
        start: index of its first token in the sample.
        item: the prepared media.
        is_target: True for decoders: the span's tokens are predicted.
    """

    component: str
    start: int
    item: MediaItem
    is_target: bool


@dataclass(frozen=True)
class Sample:
    """Token ids, what is trained on, positions and media of one example.

    Attributes:
        id: names the row in errors and reports.
        source: metrics are split by it.
        input_ids: ``[T]`` int64; arbitrary under media spans.
        loss_mask: ``[T]`` bool; True where the text token itself is to be predicted.
        position_ids: ``[T]`` int64.
        spans: media, in order of ``start``.
        index: position in the global data order.
    """

    id: str
    source: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    spans: tuple[MediaSpan, ...] = ()
    index: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


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
