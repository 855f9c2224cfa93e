"""Convert HF-style samples (the output of a HF processor, with labels) to omnitrain's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from omnitrain.data.packing.pack import IGNORED
from omnitrain.data.packing.sample import NATIVE_PREFIX, MediaItem, MediaSpan, Sample
from omnitrain.data.render.native import unpassed
from omnitrain.errors import UserError
from omnitrain.models.discovery import Discovery
from omnitrain.models.discovery.placeholders import MODALITY_CODES


def from_hf(native: Discovery, arguments: Mapping[str, Any], index: int = 0) -> Sample:
    """Convert one sample.

    ``arguments``: arguments of the HF model's forward for this sample alone: ``input_ids`` ``[1, T]`` or ``[T]``,
    ``labels`` of that shape (-100: ignored; not shifted), and its media. All media of one modality become one item. If
    only the model's own forward reads some of the media, it gets all arguments. Names that are neither the model's
    arguments nor media have no effect. ``index``: also the sample's id.

    Raises UserError: a required argument is missing, the sample has no tokens or has padding, labels differ from the
    ids, media have no placeholders, modalities share a placeholder, or an argument would not reach the model.
    """
    ids, trained = _tokens(arguments, index)
    make = partial(Sample, id=str(index), source="samples", input_ids=ids, loss_mask=trained, index=index)
    extras = native.extras(ids, trained)
    if _is_read_in_forward(native, arguments, index):
        known = native.forward_arguments
        return make(
            position_ids=np.arange(ids.size),
            token_inputs={name: values for name, values in extras.items() if name not in known},
            forward_inputs={name: np.asarray(value) for name, value in arguments.items() if name in known},
        )
    if (mask := arguments.get("attention_mask")) is not None and not np.all(mask):
        raise UserError(f"sample {index}: attention_mask has zeros; remove the padding")
    given = _media(native, arguments)
    where = _placeholder_positions(native, list(given), ids, index)
    token_inputs = {name: np.asarray(arguments.get(name, values)).reshape(-1) for name, values in extras.items()}
    computed = native.positions(ids, dict(chain.from_iterable(map(dict.items, given.values()))), token_inputs)
    return make(
        position_ids=_positions(arguments, computed, index),
        spans=tuple(_span(name, native.interfaces[name].token_id, given[name], at) for name, at in where.items()),
        token_inputs=token_inputs,
    )


def _media(native: Discovery, arguments: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Modality -> its arguments, of those modalities that the sample has."""
    there = {name: np.asarray(value) for name, value in arguments.items() if value is not None}
    media = {m: {n: there[n] for n in each.arguments if n in there} for m, each in native.interfaces.items()}
    return {modality: arrays for modality, arrays in media.items() if arrays}


def _tokens(arguments: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids, and whether each is trained."""
    for name in ("input_ids", "labels"):
        if name not in arguments:
            raise UserError(f"sample {index} has no {name!r}; it has {sorted(arguments)}")
    ids, labels = (np.asarray(arguments[name]).reshape(-1).astype(np.int64) for name in ("input_ids", "labels"))
    if not ids.size:
        raise UserError(f"sample {index} has no tokens; remove it")
    trained = labels != IGNORED
    if labels.shape != ids.shape or (labels[trained] != ids[trained]).any():
        raise UserError(
            f"sample {index}: each label must be the input id of its token, or {IGNORED} for tokens that do not count"
        )
    return ids, trained


def _is_read_in_forward(native: Discovery, arguments: Mapping[str, Any], index: int) -> bool:
    """Whether the model's own forward must read the sample, because only it takes some of its arguments."""
    media = {name for interface in native.interfaces.values() for name in interface.arguments}
    passed = {"input_ids", "labels", "attention_mask", "position_ids", *native.extras.names, *media}
    lost = unpassed(arguments, passed, native.forward_arguments)
    if lost and native.in_forward and native.forward_arguments.issuperset(lost):
        return True
    if lost:
        reasons = "".join(f"; {modality}: {why}" for modality, why in native.refused.items())
        takes = sorted(media) or "only text"
        raise UserError(
            f"sample {index}: {', '.join(lost)} would not reach the model; omnitrain passes {takes} to it{reasons}"
        )
    return False


def _positions(arguments: Mapping[str, Any], computed: np.ndarray, index: int) -> np.ndarray:
    """Return the given position ids, or the positions that the model's own function computes."""
    given = arguments.get("position_ids")
    if given is None:
        return computed
    if np.size(given) != computed.size:
        raise UserError(
            f"sample {index}: position_ids have the shape {list(np.shape(given))}; expected {list(computed.shape)}"
        )
    return np.asarray(given).reshape(computed.shape).astype(np.int64)


def _placeholder_positions(
    native: Discovery, modalities: Sequence[str], ids: np.ndarray, index: int
) -> dict[str, np.ndarray]:
    """Modality -> ``[n]`` int64, positions of its placeholders; marks around videos tell them from images."""
    tokens = [native.interfaces[modality].token_id for modality in modalities]
    if len(set(tokens)) == len(tokens):
        return {modality: np.flatnonzero(ids == token) for modality, token in zip(modalities, tokens, strict=True)}
    if native.extras.video_marks is None:
        raise UserError(
            f"sample {index} has features of {' and '.join(modalities)}, which share a placeholder token in this "
            "model, so omnitrain cannot assign the placeholders; give media of one modality, or a Sample with spans"
        )
    types = native.extras.modalities(ids)
    return {modality: np.flatnonzero(types == MODALITY_CODES[modality]) for modality in modalities}


def _span(modality: str, token: int, features: dict[str, np.ndarray], where: np.ndarray) -> MediaSpan:
    if not len(where):
        raise UserError(
            f"a sample has {modality} features ({', '.join(features)}) but no placeholder for them (token {token})"
        )
    item = MediaItem(features, len(where))
    return MediaSpan(NATIVE_PREFIX + modality, int(where[0]), item, is_target=False, scattered=where)


def to_samples(native: Discovery, samples: Sequence[Any]) -> list[Sample]:
    """Convert HF-style samples to :class:`Sample`; other samples stay as they are."""

    def converted(arguments: Mapping[str, Any], index: int) -> Sample:
        arrays = {
            name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
        }
        return from_hf(native, arrays, index)

    return [s if isinstance(s, Sample) else converted(s, index) for index, s in enumerate(samples)]
