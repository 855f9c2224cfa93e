"""Texts that stand for media, and where their tokens lie once the whole text is tokenised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.expansion import Expansion, Medium
from omnitrain.data.native import NativeInputs
from omnitrain.data.sample import NATIVE_PREFIX, MediaItem, MediaSpan
from omnitrain.data.template_marks import Span
from omnitrain.errors import UserError


@dataclass(frozen=True)
class Insert(ABC):
    """A text in place of the characters ``at`` of the template's."""

    at: Span
    text: str

    @abstractmethod
    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """Its items and the tokens that their rows fill.

        Raises:
            UserError: the tokens are not those that the component expects.
        """


@dataclass(frozen=True)
class AttachedInsert(Insert):
    """An item of the attached component ``name``: its start token, and the same token for each of its rows."""

    name: str
    item: MediaItem
    is_target: bool

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """See :meth:`Insert.spans`."""
        found = np.flatnonzero(tokens.within(self))
        if len(found) != 1 + self.item.num_tokens:
            raise UserError(
                f"{self.name}: its start token and {self.item.num_tokens} rows became {len(found)} tokens; the start "
                "token must be a special token of the tokenizer"
            )
        return [MediaSpan(self.name, int(found[0]) + 1, self.item, self.is_target)]


@dataclass(frozen=True)
class NativeInsert(Insert):
    """A medium that the foundation reads by itself, as its processor shows it."""

    row_id: str
    medium: Medium
    expansion: Expansion

    def rows(self, tokens: PlacedTokens, native: NativeInputs, modality: str) -> np.ndarray:
        """``[rows]`` tokens that the rows of one of its modalities fill."""
        return np.flatnonzero(tokens.within(self) & (tokens.ids == native.placeholders[modality]))

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """See :meth:`Insert.spans`."""
        spans = []
        for modality, features in self.expansion.features.items():
            rows = self.rows(tokens, native, modality)
            if not len(rows):
                raise UserError(
                    f"row {self.row_id!r}: the processor's text has no token {native.placeholders[modality]} for the "
                    f"rows of this {modality}; the processor belongs to another model, or is set up for another"
                )
            item = MediaItem(features, len(rows))
            is_run = rows[-1] - rows[0] + 1 == len(rows)
            spans.append(MediaSpan(NATIVE_PREFIX + modality, int(rows[0]), item, False, None if is_run else rows))
        return spans


@dataclass(frozen=True)
class PlacedTokens:
    """The tokens of a text with all inserts in place.

    Attributes:
        ids: ``[T]`` int64.
        starts: ``[T]``, first character of each.
        stops: ``[T]``, character behind each.
        inserts: in the order of the text.
    """

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    inserts: tuple[Insert, ...]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str, inserts: Sequence[Insert], *, adds_special: bool
    ) -> PlacedTokens:
        """Tokenise ``text`` with every insert in place of its characters.

        Args:
            tokenizer: a fast one.
            text: the template's.
            inserts: in the order of the text.
            adds_special: whether the tokenizer adds its own start and end.
        """
        pieces, end = [], 0
        for insert in inserts:
            pieces += [text[end : insert.at[0]], insert.text]
            end = insert.at[1]
        whole = "".join([*pieces, text[end:]])
        encoding = tokenizer(whole, add_special_tokens=adds_special, return_offsets_mapping=True)
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return cls(np.array(encoding["input_ids"], dtype=np.int64), offsets[:, 0], offsets[:, 1], tuple(inserts))

    def within(self, insert: Insert) -> np.ndarray:
        """``[T]`` bool: tokens of an insert."""
        start = self._moved(insert.at[0])
        return (self.starts < start + len(insert.text)) & (self.stops > start)

    def covered(self, spans: Sequence[Span]) -> np.ndarray:
        """``[T]`` bool: tokens that begin in one of the spans of the text without inserts."""
        covered = np.zeros(len(self.ids), dtype=bool)
        for start, stop in spans:
            covered |= (self.starts >= self._moved(start)) & (self.starts < self._moved(stop))
        return covered

    def _moved(self, character: int) -> int:
        """Where a character of the text without inserts went."""
        return character + sum(
            len(insert.text) - (insert.at[1] - insert.at[0]) for insert in self.inserts if insert.at[1] <= character
        )
