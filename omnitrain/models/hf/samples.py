"""Convert HF-style samples (the output of a HF processor, with labels) to omnitrain's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omnitrain.data.packing.pack import IGNORED
from omnitrain.data.packing.sample import Sample
from omnitrain.data.render.native import unpassed
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.errors import UserError
from omnitrain.models.discovery import Discovery, native_inputs


def from_hf(native: Discovery, arguments: Mapping[str, Any], index: int = 0) -> Sample:
    """Convert one sample, as :class:`OmniDataCollatorWithPacking` does; but it has labels and no padding.

    ``arguments``: of the HF model's forward for this sample alone. If only that forward reads some of the media, it
    gets all of them. Names that are neither the model's arguments nor media have no effect. ``index``: also the
    sample's id. Raises UserError: they are not of such a sample, or one of them would not reach the model.
    """
    given = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in arguments.items() if v is not None}
    for name in ("input_ids", "labels"):
        if name not in given:
            raise UserError(f"sample {index} has no {name!r}; it has {sorted(given)}")
    if not np.size(given["input_ids"]):
        raise UserError(f"sample {index} has no tokens; remove it")
    if _is_read_in_forward(native, given, index):
        return _of_forward(native, given, index)
    if (mask := given.get("attention_mask")) is not None and not np.all(mask):
        raise UserError(f"sample {index}: attention_mask has zeros; remove the padding")
    collator = OmniDataCollatorWithPacking(native_inputs(native))
    taken = {name: given[name] for name in (*collator.packing_features, *collator.concat_features) if name in given}
    try:
        return collator.sample(taken | {"id": f"{index}", "source": "samples"}, index)
    except ValueError as error:
        raise UserError(f"sample {index}: {error}") from error


def _of_forward(native: Discovery, given: Mapping[str, Any], index: int) -> Sample:
    """Return a sample that the model's own forward reads, with all arguments that it takes."""
    ids, labels = (np.asarray(given[name]).reshape(-1).astype(np.int64) for name in ("input_ids", "labels"))
    known, trained = native.forward_arguments, labels != IGNORED
    if labels.shape != ids.shape or (labels[trained] != ids[trained]).any():
        raise UserError(f"sample {index}: each label must be the input id of its token, or {IGNORED}")
    return Sample(
        id=str(index),
        source="samples",
        input_ids=ids,
        loss_mask=trained,
        position_ids=np.arange(ids.size),
        index=index,
        token_inputs={n: values for n, values in native.extras(ids, trained).items() if n not in known},
        forward_inputs={name: np.asarray(value) for name, value in given.items() if name in known},
    )


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


def to_samples(native: Discovery, samples: Sequence[Any]) -> list[Sample]:
    """Convert HF-style samples to :class:`Sample`; other samples stay as they are."""
    return [one if isinstance(one, Sample) else from_hf(native, one, index) for index, one in enumerate(samples)]
