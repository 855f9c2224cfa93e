"""What a pack shows: the text of its tokens, which of them are predicted, and the media between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.parts import MediaPart, content_parts, media_parts
from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.render.processor import OmniProcessor, parts_of_items
from omnitrain.data.sources.rows import Row

_MOST_OF_SAMPLE, _MOST_TOKENS = 1000, 6000  # text tokens of a sample and of a pack that are shown
_TEXT, _GAP = -1, -2
_TOKENS_OF_CHARACTER = 4  # most tokens that are decoded together: a character has up to 4 bytes


@dataclass(frozen=True)
class TokenView:
    """A token, or the tokens of one character."""

    text: str  # its text
    ids: tuple[int, ...]  # its token ids
    start: int  # index of the first one in the pack
    position: tuple[int, ...]  # position of the first one, for each axis
    is_predicted: bool  # whether the loss has it
    is_read: bool = True  # whether the model gets it. Not so for a last token that is only predicted


@dataclass(frozen=True)
class ItemView:
    """Tokens of an image, sound or video that lie beside each other."""

    component: str  # the component that reads or writes it
    is_predicted: bool  # whether the loss has its tokens
    start: int  # index of its first token here in the pack
    num_tokens: int  # its tokens here
    position: tuple[int, ...]  # position of the first of them, for each axis
    features: Mapping[str, str]  # argument of the component -> shape and dtype, for the whole item
    part: MediaPart | None  # the part of the row that it shows; None: it is not known, or shown before

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
    """A sample of a pack."""

    row: Row  # its data row
    start: int  # index of its first token in the pack
    num_tokens: int  # its length
    predicted: Mapping[str, int]  # name of a loss -> tokens that are predicted
    positions: tuple[tuple[int, int], ...]  # first and last position of each axis
    pieces: tuple[Piece, ...]  # its tokens and media, in order
    # media of the row that have no tokens of their own in the pack, as the foundation's forward reads them
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
class PackView:
    """A pack."""

    samples: tuple[SampleView, ...]  # its samples, in order
    num_tokens: int  # its length
    capacity: int  # the most tokens that a pack holds
    predicted: Mapping[str, int]  # name of a loss -> tokens that are predicted
    # ``predicted text``, ``NAME reads``, ``NAME writes`` -> first token of each run, and the one after it
    lanes: Mapping[str, Sequence[tuple[int, int]]]
    position_ids: np.ndarray  # ``[axes, T]``

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
    """A row that training skips, what its messages say, with marks for media, and its media if they can be read."""

    rejected: Rejected
    row: Row
    texts: tuple[str, ...]
    parts: tuple[MediaPart, ...]


def view_pack(pack: Pack, rows: Sequence[Row], processor: OmniProcessor, capacity: int) -> PackView:
    """Return what a pack on the host shows; ``rows``: of its samples; ``capacity``: tokens that a pack holds."""
    tokens, items = _Tokens(pack, processor.tokenizer), _items(pack)
    room = _MOST_TOKENS
    samples = []
    for index, (row, (start, stop)) in enumerate(zip(rows, pairwise(pack.cu_seqlens.tolist()), strict=True)):
        sample = _view_sample(start, stop, row, items.get(index, []), tokens, processor, room)
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
        self.labels = dict(zip(pack.text_rows.tolist(), pack.text_labels.tolist(), strict=True))  # by the token before
        self._tokenizer = tokenizer
        self.position_ids = pack.position_ids.reshape(-1, pack.num_tokens).numpy()

    def position(self, index: int) -> tuple[int, ...]:
        return tuple(self.position_ids[:, index].tolist())

    def texts(self, first: int, stop: int, start_of_sample: int) -> Iterator[TokenView]:
        """Yield the tokens from ``first`` to ``stop``, the tokens of one character together."""
        while first < stop:
            ends = range(first + 1, min(first + _TOKENS_OF_CHARACTER, stop) + 1)
            last = next((end for end in ends if "\ufffd" not in self._decoded(self._ids[first:end])), first + 1)
            ids, is_predicted = self._ids[first:last], first > start_of_sample and first - 1 in self.labels
            yield TokenView(self._text(ids, first), tuple(ids), first, self.position(first), is_predicted)
            first = last

    def unread(self, stop: int) -> Iterator[TokenView]:
        """Yield the token that the last one of a sample predicts, if it does: the model does not get it."""
        if (label := self.labels.get(stop - 1)) is not None:
            yield TokenView(self._decoded([label]), (label,), stop, (), True, is_read=False)

    def _text(self, ids: list[int], first: int) -> str:
        """Decode tokens with the one before them, without which some tokenizers would leave out a space."""
        before = self._ids[max(0, first - 1) : first]
        known, both = self._decoded(before), self._decoded([*before, *ids])
        return both[len(known) :] if both.startswith(known) else self._decoded(ids)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _view_sample(
    start: int, stop: int, row: Row, items: Sequence[_Item], tokens: _Tokens, processor: OmniProcessor, room: int
) -> SampleView:
    """Return what a sample shows, with the texts of at most ``room`` tokens."""
    parts = parts_of_items([item.component for item in items], row, processor)
    predicted = Counter(text=sum(index in tokens.labels for index in range(start, stop)))
    for item in items:
        predicted[item.component] += len(item.positions) if item.is_target else 0
    owners = _owners(start, stop, items, min(_MOST_OF_SAMPLE, max(0, room)))
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    pieces = [
        piece
        for first, last in pairwise(edges)
        for piece in _pieces(start + first, start + last, int(owners[first]), start, tokens, items, parts)
    ]
    axes = tokens.position_ids[:, start:stop]
    return SampleView(
        row=row,
        start=start,
        num_tokens=stop - start,
        predicted=predicted,
        positions=tuple((int(axis.min()), int(axis.max())) for axis in axes),
        pieces=(*pieces, *tokens.unread(stop)),
        others=tuple(part for part in media_parts(row.messages) if part not in parts),
    )


def _owners(start: int, stop: int, items: Sequence[_Item], most: int) -> np.ndarray:
    """Return each token's item, or :data:`_TEXT`; of more than ``most`` texts, the middle is a :data:`_GAP`."""
    owners = np.full(stop - start, _TEXT)
    for index, item in enumerate(items):
        owners[item.positions - start] = index
    texts = np.flatnonzero(owners == _TEXT)
    if len(texts) > most:
        last = most * 3 // 10
        begin = texts[most - last - 1] + 1 if most else 0
        end = texts[-last] if last else None
        owners[begin:end] = _GAP
    return owners


def _pieces(
    first: int,
    stop: int,
    owner: int,
    start_of_sample: int,
    tokens: _Tokens,
    items: Sequence[_Item],
    parts: Sequence[MediaPart | None],
) -> Iterator[Piece]:
    """Yield what is shown of tokens beside each other with one owner."""
    if owner == _GAP:
        yield GapView(stop - first)
    elif owner == _TEXT:
        yield from tokens.texts(first, stop, start_of_sample)
    else:
        item, position = items[owner], tokens.position(first)
        part = parts[owner] if first == item.positions[0] else None
        yield ItemView(item.component, item.is_target, first, stop - first, position, item.features, part)


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


def _lanes(pack: Pack) -> dict[str, list[tuple[int, int]]]:
    """Return where predicted text is, and the tokens of each component."""
    lanes = {"predicted text": _stretches(pack.text_rows + 1)}
    lanes |= {f"{name} reads": _stretches(batch.positions) for name, batch in pack.inputs.items()}
    lanes |= {f"{name} writes": _stretches(batch.positions) for name, batch in pack.targets.items()}
    return lanes


def _stretches(indices: torch.Tensor) -> list[tuple[int, int]]:
    ordered = np.sort(indices.numpy())
    if not len(ordered):
        return []
    edges = [0, *(np.flatnonzero(np.diff(ordered) > 1) + 1).tolist(), len(ordered)]
    return [(int(ordered[left]), int(ordered[right - 1]) + 1) for left, right in pairwise(edges)]
