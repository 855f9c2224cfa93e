"""``Sample``: one training example, fully prepared before it is packed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

Features = dict[str, np.ndarray]

# Array of an item, ``[num_tokens]`` int64: a seed for each token, for components that draw. The adapter gives zeros; a
# pack has a function of the run's seed, of the sample's position in the global data order, and of the token's in it. In
# prompts they stay zero: nothing is drawn.
SEEDS = "seeds"

# Prefix of the component names of native modalities: ``foundation.image``, ...
NATIVE_PREFIX = "foundation."

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S*|\d+(?:\.\d+)?")  # parts of a reason that differ from row to row


class Grid(NamedTuple):
    """Where the tokens of an image or film to write stand: after the first ``before``, frame by frame, row by row."""

    before: int
    frames: int
    rows: int
    columns: int


@dataclass(frozen=True)
class MediaItem:
    """One image, sound or video, prepared for its component."""

    features: Features  # the component's arguments by name; items of a pack are concatenated along axis 0
    num_tokens: int  # in the sequence, one for each row of the component's output
    is_lowered: bool = False  # a limit of frames lowered the rate at which a video is read
    is_block: bool = False  # its tokens see each other, and a head predicts each from its own state
    grid: Grid | None = None  # of an item to write, for position ids; None: its tokens have those of a text

    @property
    def num_elements(self) -> int:
        """Number of input elements, which its cost is counted in."""
        return sum(array.size for array in self.features.values())


@dataclass(frozen=True)
class MediaSpan:
    """The tokens of an item in a sample. Truncation and packing never cut a span."""

    component: str  # name of the encoder or decoder, or `foundation.image`, ... for a modality that it reads by itself
    start: int  # index of the item's first token in the sample
    item: MediaItem  # the prepared item
    is_target: bool  # whether a decoder predicts the span's tokens
    scattered: np.ndarray | None = None  # [num_tokens] int64, if other tokens lie between the item's; None: one run

    @property
    def positions(self) -> np.ndarray:
        """``[num_tokens]`` int64: indices of the item's tokens in the sample."""
        if self.scattered is not None:
            return self.scattered
        return np.arange(self.start, self.start + self.item.num_tokens)


@dataclass(frozen=True)
class Sample:
    """Token ids, loss mask, positions and media of one example.

    Its length is the number of tokens that the model gets.
    """

    id: str  # name of the data row in errors and reports
    source: str  # name of the source by which metrics are split
    input_ids: np.ndarray  # `[T]` int64; arbitrary under media spans
    loss_mask: np.ndarray  # `[T]` bool; True for text tokens to predict
    position_ids: np.ndarray  # `[T]` int64, or `[axes, T]` for a foundation with several position axes (M-RoPE)
    spans: tuple[MediaSpan, ...] = ()  # media spans, in order of `start`
    index: int = 0  # position in the global data order. Negative: the sample is a stand-in that is not in the data
    seed: int | None = 0  # of the run, for `SEEDS`; None: of a prompt, in which nothing is drawn
    token_inputs: dict[str, np.ndarray] = field(default_factory=dict)  # per-token arguments of the forward, [T] each
    forward_inputs: Features = field(default_factory=dict)  # of the foundation's own forward, which reads it alone
    num_inputs: int | None = None  # of first tokens that the model gets; later ones are labels at most; None: all
    piece: int = 0  # number of the sample among the samples of its row: a text longer than a pack gives several
    num_pieces: int = 1  # number of samples of its row
    more: tuple[Sample, ...] = ()  # the other pieces of the row, if this is the first
    unconditional: Sample | None = None  # of a prompt, the same without its condition, for guidance

    @property
    def pieces(self) -> tuple[Sample, ...]:
        """The samples of its row, if this is the first of them."""
        return (replace(self, more=()), *self.more)

    @cached_property
    def elements(self) -> dict[str, int]:
        """Name of the component of its spans -> number of input elements of its items."""
        found: Counter[str] = Counter()
        for span in self.spans:
            found[span.component] += span.item.num_elements
        return dict(found)

    @property
    def num_lowered(self) -> int:
        """Number of videos that a limit of frames reads at a lower rate."""
        return sum(span.item.is_lowered for span in self.spans)

    @property
    def is_alone(self) -> bool:
        """Whether the sample must be the only one in its pack."""
        return bool(self.forward_inputs)

    @property
    def is_trained(self) -> bool:
        """Whether a loss has some of its tokens."""
        return bool(self.loss_mask[1:].any()) or any(span.is_target for span in self.spans)

    def __len__(self) -> int:
        return len(self.input_ids) if self.num_inputs is None else self.num_inputs

    def without_tail(self) -> Sample:
        """Return the sample without tokens after the last one that a loss reads or media have; causal losses stay."""
        if self.forward_inputs:
            return self
        media = [int(span.positions.max(initial=0)) + 1 for span in self.spans]
        trained = np.flatnonzero(self.loss_mask)[-1:].tolist()  # the token before predicts it
        return replace(self, num_inputs=max([1, *media, *trained]))


@dataclass(frozen=True)
class Measure:
    """The size of a sample, by which packs are filled, too; further attributes as in :class:`Sample`."""

    source: str
    length: int  # tokens that the model gets
    num_predicted: int  # tokens that the loss has, text and media
    tokens: Mapping[str, int]  # `text`, `image`, ..., and with `` predicted`` after it -> tokens; their sum is `length`
    items: Mapping[str, int]  # modality -> images, sounds or videos
    lowered: int = 0  # number of videos that a limit of frames reads at a lower rate
    elements: Mapping[str, int] = field(default_factory=dict)
    is_alone: bool = False
    index: int = 0
    piece: int = 0
    num_pieces: int = 1
    more: tuple[Measure, ...] = ()

    @property
    def pieces(self) -> tuple[Measure, ...]:
        """See :attr:`Sample.pieces`."""
        return (replace(self, more=()), *self.more)

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True)
class Rejected:
    """A data row that could not become a sample; a fatal one ended its process, and is rejected at each draw."""

    id: str
    source: str
    reason: str
    index: int = 0  # position in the global data order
    is_overlong: bool = False  # a valid sample that is larger than a pack
    is_fatal: bool = False

    @property
    def kind_of_reason(self) -> str:
        """The reason with ``...`` for numbers, paths and quoted words, so that equal problems have equal texts."""
        return _VARIABLE.sub("...", self.reason)
