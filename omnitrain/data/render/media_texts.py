"""Insert the texts of media into the template's text, and find their tokens after tokenizing the whole text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.template_marks import Span
from omnitrain.data.packing.sample import NATIVE_PREFIX, Features, MediaItem, MediaSpan, Sample
from omnitrain.data.render.expansion import Expansion, MediaExpander, Medium
from omnitrain.data.render.native import NativeInputs, unpassed
from omnitrain.data.sources.media import costing_one_row
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError


@dataclass(frozen=True)
class Insert(ABC):
    """A text that replaces the characters ``at`` of the template's text."""

    at: Span
    text: str

    @abstractmethod
    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """Return the media spans of its items; UserError: the tokens are not those that the component expects."""


@dataclass(frozen=True)
class AddedText(Insert):
    """A text that the foundation's processor adds to a conversation."""

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """Return no spans: it has no media."""
        return []


@dataclass(frozen=True)
class AttachedInsert(Insert):
    """Items of attached components, by name: of each its start token, and the same token for each of its features."""

    items: Sequence[tuple[str, MediaItem]]
    is_target: bool

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """See :meth:`Insert.spans`."""
        indices = np.flatnonzero(tokens.within(self))
        starts = [0, *accumulate(1 + item.num_tokens for _, item in self.items)]
        if len(indices) != starts[-1]:
            raise UserError(
                f"{', '.join(name for name, _ in self.items)}: found {len(indices)} tokens for start tokens and "
                f"placeholders; expected {starts[-1]}. The start token must be a special token of the tokenizer"
            )
        places = zip(self.items, starts, strict=False)
        return [MediaSpan(name, int(indices[start]) + 1, item, self.is_target) for (name, item), start in places]


@dataclass(frozen=True)
class NativeInsert(Insert):
    """A native medium of the foundation, with the text that its processor makes."""

    row_id: str
    medium: Medium
    expansion: Expansion
    is_target: bool  # whether the foundation learns to write it

    def rows(self, tokens: PlacedTokens, native: NativeInputs, modality: str) -> np.ndarray:
        """Return ``[rows]``: the indices of the placeholder tokens of one of its modalities."""
        return np.flatnonzero(tokens.within(self) & (tokens.ids == native.placeholders[modality]))

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """See :meth:`Insert.spans`."""
        spans = []
        for modality, features in self.expansion.features.items():
            rows = self.rows(tokens, native, modality)
            if not len(rows):
                raise UserError(
                    f"row {self.row_id!r}: the processor's text has no placeholder token "
                    f"{native.placeholders[modality]} for this {modality}; the processor belongs to another model, or "
                    "is configured for another one"
                )
            item = MediaItem(features, len(rows), modality == "video" and self.medium.is_lowered)
            is_run = rows[-1] - rows[0] + 1 == len(rows)
            spans.append(MediaSpan(NATIVE_PREFIX + modality, int(rows[0]), item, False, None if is_run else rows))
        return spans


@dataclass(frozen=True)
class PlacedTokens:
    """The tokens of a text with all inserts in place."""

    ids: np.ndarray  # [T] int64
    starts: np.ndarray  # [T], index of each token's first character
    stops: np.ndarray  # [T], one past each token's last character
    inserts: tuple[Insert, ...]  # in the order of the text

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str, inserts: Sequence[Insert], *, adds_special: bool
    ) -> PlacedTokens:
        """Tokenize ``text`` with every insert in place of its characters, in the order of the text."""
        pieces, end = [], 0
        for insert in inserts:
            pieces += [text[end : insert.at[0]], insert.text]
            end = insert.at[1]
        whole = "".join([*pieces, text[end:]])
        encoding = tokenizer(whole, add_special_tokens=adds_special, return_offsets_mapping=True)
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return cls(np.array(encoding["input_ids"], dtype=np.int64), offsets[:, 0], offsets[:, 1], tuple(inserts))

    def within(self, insert: Insert) -> np.ndarray:
        """Return ``[T]`` bool: the tokens of an insert."""
        start = self._moved(insert.at[0])
        return (self.starts < start + len(insert.text)) & (self.stops > start)

    def covered(self, spans: Sequence[Span]) -> np.ndarray:
        """Return ``[T]`` bool: tokens that begin in one of the spans, which refer to the text without inserts."""
        covered = np.zeros(len(self.ids), dtype=bool)
        for start, stop in spans:
            covered |= (self.starts >= self._moved(start)) & (self.starts < self._moved(stop))
        return covered

    def _moved(self, character: int) -> int:
        """Return the index of a character of the original text in the text with inserts."""
        return character + sum(
            len(insert.text) - (insert.at[1] - insert.at[0]) for insert in self.inserts if insert.at[1] <= character
        )


@dataclass(frozen=True)
class ForwardInsert(Insert):
    """A medium that only the foundation's forward reads. ``text`` is the processor's text for it, at first empty."""

    medium: Medium

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """Return no spans, because the forward makes the features."""
        return []


class ForwardEncoder:
    """Calls the HF processor of a foundation for a whole conversation."""

    def __init__(self, expander: MediaExpander, tokenizer: PreTrainedTokenizerBase, native: NativeInputs) -> None:
        self._expander, self._tokenizer, self._native = expander, tokenizer, native

    def encode(
        self, row: Row, text: str, answers: Sequence[Span], inserts: Sequence[Insert], *, adds_special: bool
    ) -> Sample:
        """Encode ``text`` with media in place; ValueError: not this conversation; UserError: none."""
        pieces = list(_pieces(text, inserts))
        media = [insert.medium for insert in inserts if isinstance(insert, ForwardInsert)]
        shown = [self._expander.tokens[medium.modality] for medium in media]
        with costing_one_row(f"{self._expander.name} cannot prepare the media of this conversation"):
            joined = "".join(chain.from_iterable(zip(pieces, [*shown, ""], strict=True)))
            output, whole, _ = self._expander.run(joined, media)
        self._expander.require_uncut(media, output)
        early, late = self._written(pieces, whole)
        if not any(early):
            raise ValueError(f"{self._expander.name} makes no tokens for these media: they are too short or too small")
        placed = [
            PlacedTokens.of(self._tokenizer, text, _shown(inserts, written), adds_special=adds_special)
            for written in (early, late)
        ]
        tokens, trained = placed[0], placed[0].covered(answers)
        ids = np.asarray(output["input_ids"]).reshape(-1)
        if not np.array_equal(ids, tokens.ids):
            raise UserError(
                f"{self._expander.name} returns {len(ids)} tokens for a conversation, and its tokenizer "
                f"{len(tokens.ids)}, or their ids differ; the tokens to train can only be found if all ids are equal"
            )
        if not np.array_equal(trained, placed[1].covered(answers)):
            raise ValueError("the processor's text for the media cannot be told apart from an assistant's answer")
        spans = [span for insert in tokens.inserts for span in insert.spans(tokens, self._native)]
        for span in spans:
            trained[span.positions] = False
        return Sample(
            id=row.id,
            source=row.source,
            input_ids=tokens.ids,
            loss_mask=trained,
            position_ids=np.arange(len(tokens.ids), dtype=np.int64),
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            token_inputs=self._token_inputs(tokens.ids, trained),
            forward_inputs=self._forward_inputs(output),
        )

    def _written(self, pieces: Sequence[str], whole: str) -> tuple[list[str], list[str]]:
        """Return the texts between the pieces, with each piece as early as possible, and as late as possible."""
        try:
            early = written_between(pieces, whole)
            late = written_between([piece[::-1] for piece in reversed(pieces)], whole[::-1])[::-1]
        except ValueError:
            raise UserError(
                f"{self._expander.name} changes the text of a conversation outside its media, so the tokens to train "
                "cannot be found"
            ) from None
        return early, [written[::-1] for written in late]

    def _token_inputs(self, ids: np.ndarray, trained: np.ndarray) -> dict[str, np.ndarray]:
        """Return the types that depend on the trained tokens, which the processor does not know."""
        values = self._native.token_types(ids, trained) if self._native.token_types is not None else {}
        return {name: array for name, array in values.items() if name not in self._native.forward_arguments}

    def _forward_inputs(self, output: Mapping[str, Any]) -> Features:
        known = self._native.forward_arguments
        found = {name: self._array(name, value) for name, value in output.items() if name in known}
        unread = unpassed(output, known, known)
        if unread or not found:
            raise UserError(
                f"{self._expander.name} returns {', '.join(unread) or 'nothing'} for media, but the foundation's "
                f"forward takes {', '.join(sorted(known))}; the processor belongs to another model"
            )
        return found

    def _array(self, name: str, value: Any) -> np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError:  # a list of arrays with different shapes
            array = np.array(None)
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"{self._expander.name} returns {name!r} as a {type(value).__name__}, which is not one array"
            )
        return array


def written_between(pieces: Sequence[str], whole: str) -> list[str]:
    """Return the texts between consecutive ``pieces`` in ``whole``, each piece as early as possible, or ValueError."""
    if not whole.startswith(pieces[0]):
        raise ValueError
    written, end = [], len(pieces[0])
    for count, piece in enumerate(pieces[1:], 2):
        start = len(whole) - len(piece) if count == len(pieces) else whole.index(piece, end)
        if start < end or not whole.startswith(piece, start):
            raise ValueError
        written.append(whole[end:start])
        end = start + len(piece)
    return written


def _pieces(text: str, inserts: Sequence[Insert]) -> Iterator[str]:
    """Yield the texts between media of the forward; texts of attached media are included in them."""
    piece, end = "", 0
    for insert in inserts:
        piece += text[end : insert.at[0]] + insert.text
        end = insert.at[1]
        if isinstance(insert, ForwardInsert):
            yield piece
            piece = ""
    yield piece + text[end:]


def _shown(inserts: Sequence[Insert], written: Sequence[str]) -> list[Insert]:
    texts = iter(written)
    return [replace(insert, text=next(texts)) if isinstance(insert, ForwardInsert) else insert for insert in inserts]
