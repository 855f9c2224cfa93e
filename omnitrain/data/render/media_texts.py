"""Insert the texts of media into the template's text, and find their tokens after tokenizing the whole text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.chat.template_marks import Span
from omnitrain.data.packing.sample import NATIVE_PREFIX, MediaItem, MediaSpan
from omnitrain.data.render.expansion import Expansion, Medium
from omnitrain.data.render.native import NativeInputs
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
class AttachedInsert(Insert):
    """An item of the attached component ``name``: its start token, and the same token for each of its features."""

    name: str
    item: MediaItem
    is_target: bool

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """See :meth:`Insert.spans`."""
        indices = np.flatnonzero(tokens.within(self))
        expected = 1 + self.item.num_tokens
        if len(indices) != expected:
            raise UserError(
                f"{self.name}: found {len(indices)} tokens for its start token and {self.item.num_tokens} "
                f"placeholders; expected {expected}. The start token must be a special token of the tokenizer"
            )
        return [MediaSpan(self.name, int(indices[0]) + 1, self.item, self.is_target)]


@dataclass(frozen=True)
class NativeInsert(Insert):
    """A native medium of the foundation, with the text that its processor makes."""

    row_id: str
    medium: Medium
    expansion: Expansion

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
