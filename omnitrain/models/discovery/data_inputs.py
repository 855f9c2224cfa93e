"""The facts about a foundation that data workers need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnitrain.data.packing.sample import Features
from omnitrain.data.render.native import NativeInputs
from omnitrain.models.discovery.discover import Discovery
from omnitrain.models.discovery.positions import PositionFunction


def native_inputs(discovery: Discovery) -> NativeInputs:
    """Return placeholders, per-token arguments and positions of a foundation for data workers (picklable)."""
    return NativeInputs(
        placeholders=discovery.token_ids,
        token_inputs=discovery.extras.names,
        positions=SamplePositions(discovery.positions),
        token_types=discovery.extras,
        in_forward=frozenset(discovery.in_forward),
        forward_arguments=discovery.forward_arguments,
        refused=discovery.refused,
        media_arguments={modality: interface.arguments for modality, interface in discovery.interfaces.items()},
    )


@dataclass(frozen=True)
class SamplePositions:
    """Computes the position ids of a sample from the features of its items."""

    function: PositionFunction  # the model's position function

    def __call__(
        self,
        input_ids: np.ndarray,
        token_inputs: Mapping[str, np.ndarray],
        features: Mapping[str, Sequence[Features]],
        *,
        audio_in_video: bool,
    ) -> np.ndarray:
        """See :class:`omnitrain.data.render.native.PositionFunction`."""
        joined: dict[str, Any] = {}
        for items in features.values():
            for name in dict.fromkeys(name for item in items for name in item):
                arrays = [item[name] for item in items if name in item]
                # Positions depend on grids, lengths, times and masks, not on pixels and spectrograms.
                if not (arrays[0].ndim > 1 and np.issubdtype(arrays[0].dtype, np.floating)):
                    joined[name] = _concatenated(arrays)
        if audio_in_video:
            joined["use_audio_in_video"] = True
        return self.function(input_ids, joined, token_inputs)


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate along axis 0; masks of different lengths are padded with zeros at the end."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    return np.concatenate([np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in arrays])
