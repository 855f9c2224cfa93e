"""Measure rows as training would read them, and pack them without making packs: lengths, rejected rows, fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from omnitrain.data.loading.loader import order_of
from omnitrain.data.loading.order import Draw
from omnitrain.data.loading.packer import SlotPacker
from omnitrain.data.loading.slots import LoaderState, SlotState
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.item_parts import modality_of, parts_of_items
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row, RowSource
from omnitrain.recipe import Data

TEXT, PREDICTED = "text", " predicted"


@dataclass(frozen=True)
class Measure:
    """The size of a sample.

    Attributes:
        source: name of the source by which metrics are split.
        length: tokens that the model gets.
        num_predicted: tokens that the loss has, text and media.
        tokens: what they are -> tokens that the model gets: ``text``, ``image``, ``audio``, ``video``, and these with
            `` predicted`` after them. They add up to ``length``.
        items: modality -> images, sounds or videos.
        is_alone: whether it must be alone in its pack.
        index: position in the global data order.
    """

    source: str
    length: int
    num_predicted: int
    tokens: Mapping[str, int]
    items: Mapping[str, int]
    is_alone: bool = False
    index: int = 0

    piece: ClassVar[int] = 0  # pieces of a document are measured like rows
    num_pieces: ClassVar[int] = 1

    @property
    def pieces(self) -> tuple[Measure, ...]:
        """The measure itself."""
        return (self,)

    def __len__(self) -> int:
        return self.length


Measured = Measure | Rejected


def measure(
    source: RowSource, processor: OmniProcessor, *, most: int, max_tokens: int, without_tails: bool
) -> Iterator[Measured]:
    """Prepare rows of a data set as training does, and yield the size of each, or why it is rejected.

    Args:
        source: the data set.
        processor: turns rows into samples.
        most: number of rows. Of a larger data set, so many are drawn at random, the same ones each time.
        max_tokens: most tokens of a sample.
        without_tails: see :meth:`Sample.without_tail`.

    Raises:
        UserError: the model cannot use the data.
    """
    for position in np.sort(np.random.default_rng(0).permutation(len(source))[:most]).tolist():
        row = source[position]
        prepared = processor.sample(row, max_tokens=max_tokens, without_tail=without_tails)
        if isinstance(prepared, Rejected):
            yield prepared
        else:
            yield from (_of_sample(piece, row, processor) for piece in prepared.pieces)


def _of_sample(sample: Sample, row: Row, processor: OmniProcessor) -> Measure:
    tokens: Counter[str] = Counter()
    items: Counter[str] = Counter()
    if sample.spans:
        parts = parts_of_items([span.component for span in sample.spans], row, processor)
        for span, part in zip(sample.spans, parts, strict=True):
            modality = modality_of(span.component, part)
            items[modality] += 1
            tokens[modality + PREDICTED * span.is_target] += span.item.num_tokens
    of_media = tokens.total()
    written = sum(span.item.num_tokens for span in sample.spans if span.is_target)
    read_text = int(sample.loss_mask[1 : len(sample)].sum())  # without a last token that is only predicted
    tokens[TEXT + PREDICTED] += read_text
    tokens[TEXT] += len(sample) - of_media - read_text
    num_predicted = int(sample.loss_mask[1:].sum()) + written
    return Measure(sample.source, len(sample), num_predicted, +tokens, items, sample.is_alone)


@dataclass(frozen=True)
class PackMeasure:
    """The size of a pack: its samples, tokens and predicted tokens."""

    num_samples: int
    num_tokens: int
    num_predicted: int


@dataclass(frozen=True)
class Packing:
    """Packs as a run would fill them.

    Attributes:
        packs: the packs.
        rows_per_pack: rows that are read for a pack, rejected ones included.
    """

    packs: Sequence[PackMeasure]
    rows_per_pack: float


def pack_measures(measured: Sequence[Sequence[Measured]], data: Data, *, seed: int, packs: int, alone: bool) -> Packing:
    """Fill packs with measured rows, in the order in which a run with one pack per step draws them.

    Args:
        measured: rows of each data set; a sample among them.
        data: the recipe's ``data`` node.
        seed: seed of the data order.
        packs: number of packs.
        alone: make packs of one sample.
    """
    endless = [source.model_copy(update={"epochs": None}) for source in data.train]
    data = data.model_copy(update={"overlong": "drop", "train": endless})
    state = LoaderState()
    if data.weights_by == "tokens":
        state = replace(state, tokens_per_draw=tuple(map(_tokens_per_draw, measured)))
    order = order_of(measured, data, seed, 1, state)
    packer = SlotPacker(data, order, _MeasuredRows(measured, order.draws()), 0, SlotState(0), alone)
    made = []
    for _ in range(packs):
        chosen = packer.choose()
        made.append(PackMeasure(len(chosen), sum(map(len, chosen)), sum(one.num_predicted for one in chosen)))
    read = packer.state.next_index - len(packer.state.held)
    return Packing(made, read / packs)


class _MeasuredRows:
    """The measured rows of one slot; see :class:`~omnitrain.data.loading.packer.PreparedStreams`."""

    def __init__(self, measured: Sequence[Sequence[Measured]], draws: Iterator[Draw]) -> None:
        self._measured, self._draws = measured, draws

    def take(self, slot: int) -> Measured:
        index, source, row = next(self._draws)
        return replace(self._measured[source][row], index=index)

    def redirect(self, slot: int, draws: Iterator[Draw]) -> None:
        self._draws = draws


def _tokens_per_draw(measured: Sequence[Measured]) -> float:
    tokens = sum(len(one) for one in measured if isinstance(one, Measure))
    return max(tokens, 1) / len(measured)
