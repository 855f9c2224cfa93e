"""HF-style samples, as a HF processor returns them with labels, for an omni model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omnitrain.data.pack import IGNORED
from omnitrain.data.sample import NATIVE_PREFIX, MediaItem, MediaSpan, Sample
from omnitrain.errors import UserError
from omnitrain.models.discovery import Discovery
from omnitrain.models.discovery.placeholders import MODALITY_CODES


def from_hf(native: Discovery, arguments: Mapping[str, Any], index: int = 0) -> Sample:
    """One sample.

    Args:
        native: the modalities that the foundation reads by itself.
        arguments: of the HF model's forward for this sample alone: ``input_ids`` ``[1, T]`` or ``[T]``, ``labels`` of
            that shape (-100: ignored; not shifted), and its media. All media of one modality become one item. With
            media that only the model's own forward reads, the sample is read there, with all arguments.
        index: position of the sample, and its id.

    Raises:
        UserError: a required argument is missing, no tokens, labels are not the ids, media without placeholders, media
            that the model does not read, or media of modalities that share a placeholder.
    """
    for name in ("input_ids", "labels"):
        if name not in arguments:
            raise UserError(f"sample {index} has no {name!r}; it has {sorted(arguments)}")
    ids, labels = (np.asarray(arguments[name]).reshape(-1).astype(np.int64) for name in ("input_ids", "labels"))
    if not ids.size:
        raise UserError(f"sample {index} has no tokens; leave it out")
    trained = labels != IGNORED
    if labels.shape != ids.shape or (labels[trained] != ids[trained]).any():
        raise UserError(f"sample {index}: labels are the input ids where they count, and {IGNORED} elsewhere")
    features = {
        modality: {name: np.asarray(arguments[name]) for name in port.arguments if arguments.get(name) is not None}
        for modality, port in native.ports.items()
    }
    if _is_read_in_forward(native, arguments, index):
        return _in_forward(native, arguments, ids, trained, index)
    given = {modality: arrays for modality, arrays in features.items() if arrays}
    places = _places(native, list(given), ids, index)
    spans = [_span(modality, native.ports[modality].token_id, given[modality], at) for modality, at in places.items()]
    extras = native.extras(ids, trained)
    token_inputs = {name: np.asarray(arguments.get(name, values)).reshape(-1) for name, values in extras.items()}
    media = {name: array for arrays in given.values() for name, array in arrays.items()}
    return Sample(
        id=str(index),
        source="samples",
        input_ids=ids,
        loss_mask=trained,
        position_ids=native.positions(ids, media, token_inputs),
        spans=tuple(spans),
        index=index,
        token_inputs=token_inputs,
    )


def _in_forward(
    native: Discovery, arguments: Mapping[str, Any], ids: np.ndarray, trained: np.ndarray, index: int
) -> Sample:
    known = native.forward_arguments
    return Sample(
        id=str(index),
        source="samples",
        input_ids=ids,
        loss_mask=trained,
        position_ids=np.arange(ids.size),
        index=index,
        token_inputs={name: values for name, values in native.extras(ids, trained).items() if name not in known},
        forward_inputs={name: np.asarray(value) for name, value in arguments.items() if name in known},
    )


def _is_read_in_forward(native: Discovery, arguments: Mapping[str, Any], index: int) -> bool:
    """Media are the arguments with several dims of floats; no port reads some that the forward takes."""
    read = {name for port in native.ports.values() for name in port.arguments}
    floats = {name for name, value in arguments.items() if (a := np.asarray(value)).dtype.kind == "f" and a.ndim > 1}
    unread = sorted(floats - read)
    if unread and native.in_forward and native.forward_arguments.issuperset(unread):
        return True
    if unread:
        reasons = "".join(f"; {modality}: {why}" for modality, why in native.refused.items())
        takes = sorted(read) or "only text"
        raise UserError(f"sample {index}: {', '.join(unread)} would not be read; the model reads {takes}{reasons}")
    return False


def _places(native: Discovery, modalities: Sequence[str], ids: np.ndarray, index: int) -> dict[str, np.ndarray]:
    """Modality -> ``[rows]`` int64, its tokens. Those of videos may be images', too; marks around them tell."""
    tokens = [native.ports[modality].token_id for modality in modalities]
    if len(set(tokens)) == len(tokens):
        return {modality: np.flatnonzero(ids == token) for modality, token in zip(modalities, tokens, strict=True)}
    if native.extras.video_marks is None:
        raise UserError(
            f"sample {index} has features of {' and '.join(modalities)}, whose rows have the same token in this model: "
            "which are whose cannot be told; give media of one of them, or a Sample, whose spans say it"
        )
    types = native.extras.modalities(ids)
    return {modality: np.flatnonzero(types == MODALITY_CODES[modality]) for modality in modalities}


def _span(modality: str, token: int, features: dict[str, np.ndarray], where: np.ndarray) -> MediaSpan:
    if not len(where):
        raise UserError(f"a sample has {modality} features ({', '.join(features)}) and no token {token} for their rows")
    item = MediaItem(features, len(where))
    return MediaSpan(NATIVE_PREFIX + modality, int(where[0]), item, is_target=False, scattered=where)


def to_samples(native: Discovery, samples: Sequence[Any]) -> list[Sample]:
    """Samples as they are, and HF-style ones turned into such."""
    return [s if isinstance(s, Sample) else from_hf(native, _arrays(s), i) for i, s in enumerate(samples)]


def _arrays(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
