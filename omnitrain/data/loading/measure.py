"""Measure rows as training would read them, and pack them without making packs: lengths, rejected rows, fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.loading.loader import order_of
from omnitrain.data.loading.order import Draw, shuffled
from omnitrain.data.loading.packer import SlotPacker
from omnitrain.data.loading.slots import SlotState
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.sample import Measure as Measure
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor, modality_of, parts_of_items, sample_within
from omnitrain.data.sources.rows import RowSource
from omnitrain.recipe import Data
from omnitrain.recipe.data import Overlong

TEXT, PREDICTED = "text", " predicted"


Measured = Measure | Rejected


def measure(
    source: RowSource,
    processor: OmniProcessor,
    *,
    most: int,
    budget: PackBudget,
    overlong: Overlong = "drop",
    without_tails: bool,
) -> Iterator[Measured]:
    """Prepare rows of a data set as training does, and yield the size of each, or why it is rejected.

    Of more than ``most`` rows, so many are drawn at random, the same ones each time; of a stream, they are the first.
    Other arguments: see :func:`~omnitrain.data.render.processor.sample_within`. Raises UserError: the model cannot use
    the data.
    """
    positions = np.arange(min(most, len(source)))
    if not source.is_stream:
        positions = np.sort(shuffled(positions, len(source), "measure"))
    for position in positions.tolist():
        row = source[position]
        prepared = sample_within(processor, row, budget, overlong, without_tail=without_tails)
        if isinstance(prepared, Rejected):
            yield prepared
        else:
            spans = [span.component for piece in prepared.pieces for span in piece.spans]
            parts = iter(parts_of_items(spans, row, processor) if spans else ())
            first, *more = (_of_sample(piece, list(islice(parts, len(piece.spans)))) for piece in prepared.pieces)
            yield replace(first, more=tuple(more))


def _of_sample(sample: Sample, parts: Sequence[MediaPart | None]) -> Measure:
    """The size of a sample; ``parts``: the part that each of its items shows, if it is known."""
    tokens: Counter[str] = Counter()
    items: Counter[str] = Counter()
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
    return Measure(
        source=sample.source,
        length=len(sample),
        num_predicted=num_predicted,
        tokens=+tokens,
        items=items,
        lowered=sample.num_lowered,
        elements=sample.elements,
        is_alone=sample.is_alone,
        piece=sample.piece,
        num_pieces=sample.num_pieces,
    )


@dataclass(frozen=True)
class PackMeasure:
    """The size of a pack: its samples, tokens and predicted tokens."""

    num_samples: int
    num_tokens: int
    num_predicted: int


@dataclass(frozen=True)
class Packing:
    """Packs as a run would fill them."""

    packs: Sequence[PackMeasure]
    rows_per_pack: float  # that are read, rejected ones included


def pack_measures(
    measured: Sequence[Sequence[Measured]],
    data: Data,
    budget: PackBudget,
    *,
    seed: int,
    packs: int,
    alone: bool,
    slots: int | None = 1,
) -> Packing:
    """Fill packs with measured rows of each data set, in the order in which the first slot of a run draws them.

    ``alone``: packs of one sample; ``slots``: packs of a step; None: the rows are some of larger data sets.
    """
    endless = [source.model_copy(update={"epochs": None}) for source in data.train]
    data = data.model_copy(update={"train": endless})
    mixes_epochs, slots = slots is None, slots or 1
    tokens = [*map(_tokens_per_draw, measured)] if data.weights_by == "tokens" else ()
    order = order_of(measured, data, seed, slots, tokens, mixes_epochs=mixes_epochs)
    packer = SlotPacker(data, order, _MeasuredRows(measured, order.draws()), 0, SlotState(0), alone, budget)
    made = []
    for _ in range(packs):
        chosen = packer.choose()
        made.append(PackMeasure(len(chosen), sum(map(len, chosen)), sum(one.num_predicted for one in chosen)))
    read = packer.state.next_index // slots - len(packer.state.held)
    return Packing(made, read / packs)


class _MeasuredRows:
    """The measured rows of one slot; see :class:`~omnitrain.data.loading.packer.PreparedStreams`."""

    def __init__(self, measured: Sequence[Sequence[Measured]], draws: Iterator[Draw]) -> None:
        self._measured, self._draws = measured, draws

    def take(self, slot: int) -> Measured:
        index, source, row = next(self._draws)
        found = self._measured[source][row]
        if isinstance(found, Measure):
            found = replace(found, more=tuple(replace(piece, index=index) for piece in found.more))
        return replace(found, index=index)

    def redirect(self, slot: int, draws: Iterator[Draw]) -> None:
        self._draws = draws


def rows_read(
    lengths: Sequence[int], measured: Sequence[Sequence[Measured]], data: Data, steps: int, rows_per_step: float
) -> list[float]:
    """Return the rows that ``steps`` read of each data set, of ``lengths`` rows, some of them ``measured``."""
    weights = np.array(data.stage_weights())  # [stages, data sets]
    if data.weights_by == "tokens":
        weights = weights / [_tokens_per_draw(rows) for rows in measured]
    borders = np.minimum([0, *(stage.from_step for stage in data.stages), steps], steps)
    epochs = [float("inf") if source.epochs is None else source.epochs for source in data.train]
    left = np.array(epochs) * lengths
    read = np.zeros(len(lengths))
    for of_stage, num_steps in zip(weights, np.diff(borders), strict=True):
        rows = num_steps * rows_per_step
        while rows > 0 and (shares := np.where(left > read, of_stage, 0.0)).any():
            shares = shares / shares.sum()
            # Up to the next end of a data set, whose share the others then have.
            stretch = min(rows, float(np.min((left - read)[shares > 0] / shares[shares > 0])))
            read = np.where(np.isclose(read + stretch * shares, left), left, read + stretch * shares)
            rows -= stretch
    return list(read.tolist())


def _tokens_per_draw(measured: Sequence[Measured]) -> float:
    tokens = sum(len(piece) for one in measured if isinstance(one, Measure) for piece in one.pieces)
    return max(tokens, 1) / len(measured)
