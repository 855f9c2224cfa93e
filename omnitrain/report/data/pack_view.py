"""What a pack shows: the text of its tokens, which of them are predicted, and the media between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.parts import MediaPart, content_parts, media_parts
from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.render.item_parts import parts_of_items
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row

_MOST_OF_SAMPLE, _MOST_TOKENS = 1000, 6000  # text tokens of a sample and of a pack that are shown
_TOKENS_OF_CHARACTER = 4  # most tokens that are decoded together: a character has up to 4 bytes


@dataclass(frozen=True)
class TokenView:
    """A token, or the tokens of one character.

    Attributes:
        text: its text.
        ids: its token ids.
        start: index of the first one in the pack.
        position: position of the first one, for each axis.
        is_predicted: whether the loss has it.
        is_read: whether the model gets it. Not so for a last token that is only predicted.
    """

    text: str
    ids: tuple[int, ...]
    start: int
    position: tuple[int, ...]
    is_predicted: bool
    is_read: bool = True


@dataclass(frozen=True)
class ItemView:
    """Tokens of an image, sound or video that lie beside each other.

    Attributes:
        component: the component that reads or writes it.
        is_predicted: whether the loss has its tokens.
        start: index of its first token here in the pack.
        num_tokens: its tokens here.
        position: position of the first of them, for each axis.
        features: argument of the component -> shape and dtype, for the whole item.
        part: the part of the row that it shows; None: it is not known, or shown before.
    """

    component: str
    is_predicted: bool
    start: int
    num_tokens: int
    position: tuple[int, ...]
    features: Mapping[str, str]
    part: MediaPart | None

    @property
    def words(self) -> str:
        """Which component does what with how many tokens."""
        return f"{self.component} {'writes' if self.is_predicted else 'reads'} {self.num_tokens:,} tokens"


@dataclass(frozen=True)
class GapView:
    """Tokens that are not shown."""

    num_tokens: int


Piece = TokenView | ItemView | GapView


@dataclass(frozen=True)
class SampleView:
    """A sample of a pack.

    Attributes:
        row: its data row.
        start: index of its first token in the pack.
        num_tokens: its length.
        predicted: name of a loss -> tokens that are predicted.
        positions: first and last position of each axis.
        pieces: its tokens and media, in order.
        others: media of the row that have no tokens of their own in the pack, as the foundation's forward reads them.
    """

    row: Row
    start: int
    num_tokens: int
    predicted: Mapping[str, int]
    positions: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    others: tuple[MediaPart, ...]

    @property
    def name(self) -> str:
        """Source and id of its row."""
        return f"{self.row.source}: {self.row.id}"

    @property
    def positions_words(self) -> str:
        """First and last position of each axis."""
        return ", ".join(f"{first} to {last}" for first, last in self.positions)

    @property
    def predicted_words(self) -> str:
        """Names of losses with their tokens."""
        return _counts(self.predicted)


@dataclass(frozen=True)
class Stretch:
    """Tokens from ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int


@dataclass(frozen=True)
class PackView:
    """A pack.

    Attributes:
        samples: its samples, in order.
        num_tokens: its length.
        capacity: the most tokens that a pack holds.
        predicted: name of a loss -> tokens that are predicted.
        lanes: what tokens are -> where they are: ``predicted text``, ``NAME reads``, ``NAME writes``.
        position_ids: ``[axes, T]``.
    """

    samples: tuple[SampleView, ...]
    num_tokens: int
    capacity: int
    predicted: Mapping[str, int]
    lanes: Mapping[str, Sequence[Stretch]]
    position_ids: np.ndarray

    @property
    def fill(self) -> float:
        """Share of the capacity that has tokens."""
        return self.num_tokens / self.capacity

    @property
    def words(self) -> str:
        """Its samples, and how full it is."""
        return f"{len(self.samples)} samples, {self.num_tokens:,} of {self.capacity:,} tokens ({self.fill:.1%} full)"

    @property
    def predicted_words(self) -> str:
        """Names of losses with their tokens."""
        return _counts(self.predicted)


@dataclass(frozen=True)
class RejectedView:
    """A row that training skips.

    Attributes:
        rejected: why.
        row: the row.
        texts: what its messages say, with a mark for each medium.
        parts: its media; empty if its messages cannot be read.
    """

    rejected: Rejected
    row: Row
    texts: tuple[str, ...]
    parts: tuple[MediaPart, ...]


def view_pack(pack: Pack, rows: Sequence[Row], processor: OmniProcessor, capacity: int) -> PackView:
    """Return what a pack shows.

    Args:
        pack: the pack, on the host.
        rows: the row of each sample, in the order of the pack.
        processor: the processor that made the samples.
        capacity: the most tokens that a pack holds.
    """
    tokens, items = _Tokens(pack, processor.tokenizer), _items(pack)
    room = _MOST_TOKENS
    samples = []
    for index, (row, (start, stop)) in enumerate(zip(rows, pairwise(pack.cu_seqlens.tolist()), strict=True)):
        sample = _view_sample(Stretch(start, stop), row, items.get(index, []), tokens, processor, room)
        room -= sum(isinstance(piece, TokenView) for piece in sample.pieces)
        samples.append(sample)
    return PackView(
        samples=tuple(samples),
        num_tokens=pack.num_tokens,
        capacity=capacity,
        predicted=pack.loss_counts(),
        lanes=_lanes(pack),
        position_ids=tokens.position_ids,
    )


def view_rejected(rejected: Rejected, row: Row) -> RejectedView:
    """Return what a rejected row shows."""
    try:
        texts, parts = [], tuple(media_parts(row.messages))
        for message in row.messages:
            of_message = [
                one["text"] if one["type"] == "text" else f"[{one['type']}]" for one in content_parts(message)
            ]
            texts.append(f"{message['role']}: {' '.join(of_message)}")
    except Exception:  # malformed messages fail in any way
        texts, parts = [repr(row.messages)], ()
    return RejectedView(rejected, row, tuple(texts), parts)


def _counts(predicted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in predicted.items() if count) or "none"


@dataclass(frozen=True)
class _Item:
    """An item in a pack; ``positions``: index of each of its tokens."""

    component: str
    is_target: bool
    positions: np.ndarray
    features: Mapping[str, str]


class _Tokens:
    """The tokens of a pack. A token is predicted if a head predicts text from the token before it."""

    def __init__(self, pack: Pack, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ids = pack.input_ids[0].tolist()
        self._labels = dict(zip(pack.text_rows.tolist(), pack.text_labels.tolist(), strict=True))  # by the token before
        self._tokenizer = tokenizer
        self.position_ids = pack.position_ids.reshape(-1, pack.num_tokens).numpy()

    def num_predicted(self, sample: Stretch) -> int:
        return sum(index in self._labels for index in range(sample.start, sample.stop))

    def position(self, index: int) -> tuple[int, ...]:
        return tuple(self.position_ids[:, index].tolist())

    def texts(self, run: Stretch, sample: Stretch) -> Iterator[TokenView]:
        """Yield the text tokens of a run."""
        first = run.start
        while first < run.stop:
            last = self._end_of_character(first, run.stop)
            ids, is_predicted = self._ids[first:last], first > sample.start and first - 1 in self._labels
            yield TokenView(self._text(ids, first), tuple(ids), first, self.position(first), is_predicted)
            first = last

    def unread(self, sample: Stretch) -> Iterator[TokenView]:
        """Yield the token that the last one of a sample predicts, if it does: the model does not get it."""
        if (label := self._labels.get(sample.stop - 1)) is not None:
            yield TokenView(self._decoded([label]), (label,), sample.stop, (), True, is_read=False)

    def _end_of_character(self, first: int, stop: int) -> int:
        for last in range(first + 1, min(first + _TOKENS_OF_CHARACTER, stop) + 1):
            if "\ufffd" not in self._decoded(self._ids[first:last]):
                return last
        return first + 1

    def _text(self, ids: list[int], first: int) -> str:
        """Decode tokens with the one before them, without which some tokenizers would leave out a space."""
        before = self._ids[max(0, first - 1) : first]
        known, both = self._decoded(before), self._decoded([*before, *ids])
        return both[len(known) :] if both.startswith(known) else self._decoded(ids)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _view_sample(
    sample: Stretch, row: Row, items: Sequence[_Item], tokens: _Tokens, processor: OmniProcessor, room: int
) -> SampleView:
    """Return what a sample shows, with the texts of at most ``room`` tokens."""
    parts = parts_of_items([item.component for item in items], row, processor)
    predicted = {"text": tokens.num_predicted(sample)}
    for item in items:
        if item.is_target:
            predicted[item.component] = predicted.get(item.component, 0) + len(item.positions)
    runs = _cut(_runs(sample, items), min(_MOST_OF_SAMPLE, max(0, room)))
    pieces = [piece for run in runs for piece in _pieces(run, sample, tokens, items, parts)]
    return SampleView(
        row=row,
        start=sample.start,
        num_tokens=sample.stop - sample.start,
        predicted=predicted,
        positions=tuple(
            (int(axis.min()), int(axis.max())) for axis in tokens.position_ids[:, sample.start : sample.stop]
        ),
        pieces=(*pieces, *tokens.unread(sample)),
        others=tuple(part for part in media_parts(row.messages) if part not in parts),
    )


@dataclass(frozen=True)
class _Run:
    """Tokens beside each other that are text (``item`` is None), of an item, or not shown."""

    tokens: Stretch
    item: int | None = None
    is_shown: bool = True


def _runs(sample: Stretch, items: Sequence[_Item]) -> list[_Run]:
    """Divide a sample into runs of text and of items."""
    owner = np.full(sample.stop - sample.start, -1)
    for index, item in enumerate(items):
        owner[item.positions - sample.start] = index
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return [
        _Run(Stretch(sample.start + left, sample.start + right), int(owner[left]) if owner[left] >= 0 else None)
        for left, right in pairwise(edges)
    ]


def _cut(runs: Sequence[_Run], most: int) -> list[_Run]:
    """Leave out the middle of a sample with more than ``most`` text tokens."""
    total = sum(run.tokens.stop - run.tokens.start for run in runs if run.item is None)
    if total <= most:
        return list(runs)
    last = most * 3 // 10
    head = _head(runs, most - last)
    tail = [_reversed(run) for run in reversed(_head([_reversed(run) for run in reversed(runs)], last))]
    start = head[-1].tokens.stop if head else runs[0].tokens.start
    stop = tail[0].tokens.start if tail else runs[-1].tokens.stop
    return [*head, _Run(Stretch(start, stop), is_shown=False), *tail]


def _head(runs: Sequence[_Run], most: int) -> list[_Run]:
    """The runs up to the ``most``-th text token."""
    kept: list[_Run] = []
    for run in runs:
        if most <= 0:
            break
        if run.item is None:
            run = replace(run, tokens=Stretch(run.tokens.start, min(run.tokens.stop, run.tokens.start + most)))
            most -= run.tokens.stop - run.tokens.start
        kept.append(run)
    return kept


def _reversed(run: _Run) -> _Run:
    """The run as seen from the other end."""
    return replace(run, tokens=Stretch(-run.tokens.stop, -run.tokens.start))


def _pieces(
    run: _Run, sample: Stretch, tokens: _Tokens, items: Sequence[_Item], parts: Sequence[MediaPart | None]
) -> Iterator[Piece]:
    if not run.is_shown:
        yield GapView(run.tokens.stop - run.tokens.start)
    elif run.item is None:
        yield from tokens.texts(run.tokens, sample)
    else:
        item, start = items[run.item], run.tokens.start
        part = parts[run.item] if start == item.positions[0] else None
        num_tokens, position = run.tokens.stop - start, tokens.position(start)
        yield ItemView(item.component, item.is_target, start, num_tokens, position, item.features, part)


def _items(pack: Pack) -> dict[int, list[_Item]]:
    """Return index of a sample -> its items, in order."""
    found: dict[int, list[_Item]] = {}
    for batches, is_target in ((pack.inputs, False), (pack.targets, True)):
        for component, batch in batches.items():
            positions = np.split(batch.positions.numpy(), np.cumsum(batch.num_tokens)[:-1])
            facts = [words for group in batch.groups for words in _features(group)]
            for sample, of_item, features in zip(batch.samples, positions, facts, strict=True):
                found.setdefault(sample, []).append(_Item(component, is_target, of_item, features))
    return {sample: sorted(items, key=lambda item: int(item.positions[0])) for sample, items in found.items()}


def _features(group: MediaGroup) -> Iterator[dict[str, str]]:
    """Yield argument -> dtype and shape, for each item of a group."""
    for index in range(len(group.num_tokens)):
        yield {
            name: f"{str(array.dtype).removeprefix('torch.')} {[group.num_rows[name][index], *array.shape[1:]]}"
            for name, array in group.features.items()
        }


def _lanes(pack: Pack) -> dict[str, list[Stretch]]:
    """Return where predicted text is, and the tokens of each component."""
    lanes = {"predicted text": _stretches(pack.text_rows + 1)}
    lanes |= {f"{name} reads": _stretches(batch.positions) for name, batch in pack.inputs.items()}
    lanes |= {f"{name} writes": _stretches(batch.positions) for name, batch in pack.targets.items()}
    return lanes


def _stretches(indices: torch.Tensor) -> list[Stretch]:
    ordered = np.sort(indices.numpy())
    if not len(ordered):
        return []
    edges = [0, *(np.flatnonzero(np.diff(ordered) > 1) + 1).tolist(), len(ordered)]
    return [Stretch(int(ordered[left]), int(ordered[right - 1]) + 1) for left, right in pairwise(edges)]
