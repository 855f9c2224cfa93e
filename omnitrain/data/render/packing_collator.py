"""Collate function that packs samples, or dicts of a HF processor's outputs, into one :class:`Pack`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from omnitrain.data.packing.pack import IGNORED, Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX, MediaItem, MediaSpan, Sample
from omnitrain.data.render.native import NativeInputs
from omnitrain.errors import UserError
from omnitrain.recipe.suggest import hint

_PER_TOKEN = ("input_ids", "labels", "attention_mask", "position_ids")
_OF_VEOMNI = re.compile(r"(image|video|audio)_(input|output)_(mask|features)")
_NEEDS_NATIVE = "; for a model with media, pass its `model.native_inputs`"
_NAMES = ("id", "source")  # of a dict of features, in addition to those that are packed or concatenated


class OmniDataCollatorWithPacking:
    """Makes one :class:`Pack` of a list of samples, or of dicts of features; the ``collate_fn`` of a ``DataLoader``.

    A dict has what a tokenizer or a HF processor returns for one conversation: tensors, arrays or lists.

    - ``input_ids``: ``[T]`` or ``[1, T]`` integers.
    - ``labels``, like ``input_ids``: the id of each token to predict, and -100 at the others. They are not shifted: the
      pack shifts them. Without labels, all tokens are predicted except placeholders of media.
    - ``attention_mask``, like ``input_ids``: tokens with 0 are padding and are removed.
    - ``position_ids``: ``[T]`` or ``[1, T]``, or ``[axes, T]`` or ``[axes, 1, T]`` (M-RoPE). By default those that the
      model computes.
    - Other per-token arguments of the model (``mm_token_type_ids``, ``token_type_ids``), like ``input_ids``.
    - Media as the model's forward takes them (``pixel_values``, ``image_grid_thw``, ``input_features``): the media of
      one conversation along dim 0, in the order of their placeholder tokens in ``input_ids``.
    - ``id`` and ``source``: texts for messages and metrics.

    The pack has the per-token features end to end as ``[1, T of all]`` int64, position ids that restart with every
    conversation, ``cu_seqlens`` ``[conversations + 1]`` int32, and the media with their dtypes (bfloat16 as float32),
    concatenated along dim 0, and the positions of their tokens. The shortest conversation comes first.
    """

    def __init__(
        self,
        native: NativeInputs | None = None,
        *,
        packing_features: Sequence[str] | None = None,
        concat_features: Sequence[str] | None = None,
    ) -> None:
        """Say what a dict of features may have: per-token and media features, by default those that the model takes.

        ``native``: ``model.native_inputs``; None: no media. Raises UserError: the model does not take a feature.
        """
        self._native = native or NativeInputs({})
        modalities = {name: m for m, names in self._native.media_arguments.items() for name in names}
        self.packing_features = tuple(packing_features or (*_PER_TOKEN, *self._native.token_inputs))
        self.concat_features = tuple(modalities if concat_features is None else concat_features)
        if "input_ids" not in self.packing_features:
            raise UserError(f"packing_features: found {list(self.packing_features)}; `input_ids` must be one of them")
        taken = {"packing_features": {*_PER_TOKEN, *self._native.token_inputs}, "concat_features": set(modalities)}
        for argument, names in taken.items():
            for name in getattr(self, argument):
                if name not in names:
                    raise UserError(f"{argument}: the model does not take {name!r}; {self._instead(name, names)}")

    def __call__(self, rows: Sequence[Sample | Mapping[str, Any]], indices: Sequence[int] | None = None) -> Pack:
        """Pack samples, or dicts with the positions ``indices`` in the global data order (None: those in ``rows``).

        Raises ValueError: features that lack, are unknown or do not fit, with the row's name; or rows that no pack has.
        """
        numbers = range(len(rows)) if indices is None else indices
        together = zip(rows, numbers, strict=True)
        return Pack.from_samples([row if isinstance(row, Sample) else self.sample(row, i) for row, i in together])

    def _instead(self, name: str, names: Collection[str]) -> str:
        if _OF_VEOMNI.fullmatch(name):
            return (
                "pass `model.native_inputs` in place of both lists: media have the names that the HF processor gives "
                "them, placeholders in `input_ids` show where they are, and samples of an ot.OmniProcessor have those "
                "that encoders read and decoders write"
            )
        more = "" if self._native.token_inputs or self._native.placeholders else _NEEDS_NATIVE
        return f"{hint(name, sorted(names))}{more}"

    def sample(self, features: Mapping[str, Any], index: int = 0) -> Sample:
        """Return the sample of one dict of features; arguments and errors as in :meth:`__call__`."""
        if not isinstance(features, Mapping):
            raise ValueError(
                f"row {index} is a {type(features).__name__}; expected a Sample or a dict of features such as "
                "input_ids (for rows of messages, pass a processor; for other rows, a collate_fn of your own)"
            )
        name = str(features.get("id", index))
        try:
            return self._sample(features, name, index)
        except ValueError as error:
            raise ValueError(f"features of row {name!r}: {error}") from error

    def _sample(self, features: Mapping[str, Any], name: str, index: int) -> Sample:
        given = {key: value for key, value in features.items() if value is not None and key not in _NAMES}
        self._require_taken(given.keys())
        per_token = self._per_token(given)
        ids = per_token.pop("input_ids")
        labels, positions = per_token.pop("labels", None), per_token.pop("position_ids", None)
        media = {
            modality: {key: _array(given[key]) for key in names if key in given}
            for modality, names in self._native.media_arguments.items()
            if any(key in given for key in names)
        }
        spans = self._spans(ids, media)
        trained = _trained(ids, labels)
        for span in spans:
            is_written = labels is not None and span.component.removeprefix(NATIVE_PREFIX) in self._native.written
            trained[span.positions] &= is_written
        token_inputs = self._token_inputs(ids, trained, per_token)
        if positions is None and self._native.positions is not None:
            of_items = {modality: [items] for modality, items in media.items()}
            positions = self._native.positions(ids, token_inputs, of_items, audio_in_video=False)
        return Sample(
            id=name,
            source=str(features.get("source", "data")),
            input_ids=ids,
            loss_mask=trained,
            position_ids=np.arange(len(ids)) if positions is None else positions,
            spans=spans,
            index=index,
            token_inputs=token_inputs,
        )

    def _require_taken(self, given: Set[str]) -> None:
        known = {*self.packing_features, *self.concat_features}
        if lost := sorted((given - known) & self._native.forward_arguments):
            raise ValueError(f"the model takes {lost}, which omnitrain does not pass to it; it passes {sorted(known)}")
        if unknown := sorted(given - known):
            raise ValueError(
                f"{unknown} are neither in packing_features nor in concat_features; {hint(unknown[0], sorted(known))}, "
                "or remove them from the dict"
            )

    def _token_inputs(
        self, ids: np.ndarray, trained: np.ndarray, given: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return what the model takes for each token besides ids and positions: given, or made by the model."""
        made = {} if self._native.token_types is None else self._native.token_types(ids, trained)
        inputs = {key: made[key] for key in self._native.token_inputs if key in made} | given
        if missing := sorted({*self._native.token_inputs} - inputs.keys()):
            raise ValueError(
                f"{missing} are missing, which the model takes for each token; the HF processor makes them"
            )
        return inputs

    def _per_token(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the per-token features ``[..., T]`` int64, without padding."""
        arrays = {key: _array(given[key]) for key in self.packing_features if key in given}
        if "input_ids" not in arrays:
            raise ValueError(f"input_ids are missing; found {sorted(given)}")
        for key, array in arrays.items():
            if array.ndim > 1 and array.shape[-2] == 1:
                arrays[key] = array = array.squeeze(-2)
            if array.ndim != 1 and not (key == "position_ids" and array.ndim == 2):
                raise ValueError(f"{key}: found the shape {list(array.shape)}; expected [T] of one conversation")
            if array.dtype.kind not in "biu" or not array.size:
                raise ValueError(f"{key}: found {array.size} values of {array.dtype}; expected integers")
            if array.shape[-1] != arrays["input_ids"].shape[-1]:
                raise ValueError(f"{key} has {array.shape[-1]} tokens, but input_ids {arrays['input_ids'].shape[-1]}")
        mask = arrays.pop("attention_mask", np.ones_like(arrays["input_ids"])).astype(bool)
        if not mask.any():
            raise ValueError("attention_mask: all tokens are padding")
        return {key: array[..., mask].astype(np.int64) for key, array in arrays.items()}

    def _spans(self, ids: np.ndarray, media: Mapping[str, dict[str, np.ndarray]]) -> tuple[MediaSpan, ...]:
        """Return a span for each modality: its item has all media of the conversation."""
        owners: dict[int, str] = {}
        marks = self._native.video_marks
        for modality, token in self._native.placeholders.items():
            if modality in media and marks is None and owners.setdefault(token, modality) != modality:
                raise ValueError(
                    f"{owners[token]} and {modality} have the same placeholder token {token}; make samples of such "
                    "rows with an OmniProcessor"
                )
        spans = []
        for modality, token in self._native.placeholders.items():
            positions = self._positions_of(modality, ids)
            if modality in media and not positions.size:
                raise ValueError(f"{sorted(media[modality])} are given, but input_ids has no placeholder {token}")
            if positions.size and modality not in media and token not in owners:
                names = sorted(self._native.media_arguments[modality])
                raise ValueError(f"input_ids has {positions.size} placeholders {token} of {modality}, but no {names}")
            if modality in media:
                item = MediaItem(media[modality], int(positions.size))
                spans.append(MediaSpan(NATIVE_PREFIX + modality, int(positions[0]), item, False, positions))
        return tuple(sorted(spans, key=lambda span: span.start))

    def _positions_of(self, modality: str, ids: np.ndarray) -> np.ndarray:
        """Return ``[n]`` int64: a modality's placeholders; marks around videos tell them from images."""
        is_placeholder, marks = ids == self._native.placeholders[modality], self._native.video_marks
        if marks is not None and modality in ("image", "video"):
            is_inside = np.cumsum(ids == marks[0]) > np.cumsum(ids == marks[1])
            is_placeholder &= is_inside == (modality == "video")
        return np.flatnonzero(is_placeholder)


def _trained(ids: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
    """Return ``[T]`` bool: the tokens that labels predict; without labels all of them."""
    trained = np.ones(len(ids), dtype=bool) if labels is None else labels != IGNORED
    if labels is not None and (wrong := np.flatnonzero(trained & (labels != ids))).size:
        at = int(wrong[0])
        raise ValueError(
            f"labels: found {labels[at]} at token {at}, but input_ids has {ids[at]}; expected the same id, or "
            f"{IGNORED} for a token that is not predicted (labels must not be shifted)"
        )
    return trained


def _array(value: Any) -> np.ndarray:
    """Return a tensor, an array or a list as an array; numpy has no bfloat16, so it becomes float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(value)
