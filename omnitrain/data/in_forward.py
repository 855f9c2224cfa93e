"""A conversation for the foundation's own forward: one call of its HF processor, whose outputs are taken as they come.

What the processor wrote in the place of each medium follows from the text that it gave to its tokenizer. So the tokens
that are trained on are found as in any other conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from omnitrain.data.expansion import MediaExpander, Medium
from omnitrain.data.inserts import Insert, PlacedTokens
from omnitrain.data.media import costing_one_row
from omnitrain.data.native import NativeInputs
from omnitrain.data.renderer import Encoded
from omnitrain.data.sample import Features, MediaSpan
from omnitrain.data.template_marks import Span
from omnitrain.errors import UserError


@dataclass(frozen=True)
class ForwardInsert(Insert):
    """A medium that only the foundation's forward reads. ``text``: what the processor wrote; before that, nothing."""

    medium: Medium

    def spans(self, tokens: PlacedTokens, native: NativeInputs) -> list[MediaSpan]:
        """None: its rows are made in the forward."""
        return []

    def showing(self, text: str) -> ForwardInsert:
        """The same with the text that the processor wrote."""
        return ForwardInsert(self.at, text, self.medium)


class ForwardEncoder:
    """The HF processor of a foundation, called for a whole conversation."""

    def __init__(self, expander: MediaExpander, tokenizer: PreTrainedTokenizerBase, native: NativeInputs) -> None:
        self._expander, self._tokenizer, self._native = expander, tokenizer, native

    def encode(self, text: str, answers: Sequence[Span], inserts: Sequence[Insert], *, adds_special: bool) -> Encoded:
        """Tokens of a conversation with all that the forward takes of the processor's output.

        Args:
            text: the template's.
            answers: characters of ``text`` that are trained on.
            inserts: every medium of the conversation, in the order of the text.
            adds_special: whether the tokenizer adds its own start and end.

        Raises:
            ValueError: this conversation cannot be used.
            UserError: no conversation can: the processor does not fit.
        """
        pieces = list(_pieces(text, inserts))
        media = [insert.medium for insert in inserts if isinstance(insert, ForwardInsert)]
        shown = [self._expander.tokens[medium.modality] for medium in media]
        with costing_one_row(f"{self._expander.name} cannot prepare the media of this conversation"):
            output, whole = self._expander.run(_joined(pieces, shown), media)
        self._expander.require_uncut(media, output)
        early, late = self._written(pieces, whole)
        if not any(early):
            raise ValueError(f"{self._expander.name} makes no token of these media: they are too short or too small")
        placed = [
            PlacedTokens.of(self._tokenizer, text, _shown(inserts, written), adds_special=adds_special)
            for written in (early, late)
        ]
        tokens, trained = placed[0], placed[0].covered(answers)
        self._require_same(tokens, output)
        if not np.array_equal(trained, placed[1].covered(answers)):
            raise ValueError("which characters the processor wrote for media cannot be told from an assistant's answer")
        spans = [span for insert in tokens.inserts for span in insert.spans(tokens, self._native)]
        for span in spans:
            trained[span.positions] = False
        return Encoded(
            input_ids=tokens.ids,
            loss_mask=trained,
            position_ids=np.arange(len(tokens.ids), dtype=np.int64),
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            token_inputs=self._token_inputs(tokens.ids, trained),
            forward_inputs=self._forward_inputs(output),
        )

    def _written(self, pieces: Sequence[str], whole: str) -> tuple[list[str], list[str]]:
        """What stands between the pieces of a text: with each as early as may be, and as late."""
        try:
            return written_between(pieces, whole), [part[::-1] for part in _written_from_behind(pieces, whole)]
        except ValueError:
            raise UserError(
                f"{self._expander.name} changes the text of a conversation beyond its media, so that the tokens to "
                "train on cannot be told"
            ) from None

    def _require_same(self, tokens: PlacedTokens, output: Mapping[str, Any]) -> None:
        ids = np.asarray(output["input_ids"]).reshape(-1)
        if not np.array_equal(ids, tokens.ids):
            raise UserError(
                f"{self._expander.name} returns {len(ids)} tokens for a conversation, its tokenizer {len(tokens.ids)}, "
                "or other ids; without the same ids the tokens to train on cannot be found"
            )

    def _token_inputs(self, ids: np.ndarray, trained: np.ndarray) -> dict[str, np.ndarray]:
        """What the processor cannot know: types that follow from the tokens to train on."""
        values = self._native.token_types(ids, trained) if self._native.token_types is not None else {}
        return {name: array for name, array in values.items() if name not in self._native.forward_arguments}

    def _forward_inputs(self, output: Mapping[str, Any]) -> Features:
        known = self._native.forward_arguments
        found = {name: self._array(name, value) for name, value in output.items() if name in known}
        unread = [name for name, value in output.items() if name not in known and _is_content(value)]
        if unread or not found:
            raise UserError(
                f"{self._expander.name} returns {', '.join(unread) or 'nothing'} for media, and the foundation's "
                f"forward takes {', '.join(sorted(known))}; the processor belongs to another model"
            )
        return found

    def _array(self, name: str, value: Any) -> np.ndarray:
        try:
            array = np.asarray(value)
        except ValueError:  # lists of several shapes
            array = np.array(None)
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"{self._expander.name} returns {name!r} as a {type(value).__name__}, which is no one array"
            )
        return array


def written_between(pieces: Sequence[str], whole: str) -> list[str]:
    """What was put between consecutive ``pieces`` of a text to make ``whole`` of it, each piece as early as may be.

    Raises:
        ValueError: something else was done to the text.
    """
    if not whole.startswith(pieces[0]):
        raise ValueError
    written, end = [], len(pieces[0])
    for place, piece in enumerate(pieces[1:], 2):
        start = len(whole) - len(piece) if place == len(pieces) else whole.index(piece, end)
        if start < end or not whole.startswith(piece, start):
            raise ValueError
        written.append(whole[end:start])
        end = start + len(piece)
    return written


def _written_from_behind(pieces: Sequence[str], whole: str) -> list[str]:
    return written_between([piece[::-1] for piece in reversed(pieces)], whole[::-1])[::-1]


def _pieces(text: str, inserts: Sequence[Insert]) -> Iterator[str]:
    """The text between media of the forward; those of attached components are in it as they will stand there."""
    piece, end = "", 0
    for insert in inserts:
        piece += text[end : insert.at[0]] + insert.text
        end = insert.at[1]
        if isinstance(insert, ForwardInsert):
            yield piece
            piece = ""
    yield piece + text[end:]


def _joined(pieces: Sequence[str], between: Sequence[str]) -> str:
    return "".join(part for pair in zip(pieces, [*between, ""], strict=True) for part in pair)


def _shown(inserts: Sequence[Insert], written: Sequence[str]) -> list[Insert]:
    texts = iter(written)
    return [insert.showing(next(texts)) if isinstance(insert, ForwardInsert) else insert for insert in inserts]


def _is_content(value: Any) -> bool:
    """Pixels or a spectrogram: without them a medium would not be read."""
    try:
        array = np.asarray(value)
    except ValueError:
        return True
    return array.ndim > 1 and array.dtype.kind == "f"
