"""What a foundation that reads media by itself tells the data side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnitrain.data.native import NativeInputs
from omnitrain.data.sample import Features
from omnitrain.models.discovery.discover import Discovery
from omnitrain.models.discovery.positions import PositionFunction


def native_inputs(discovery: Discovery) -> NativeInputs:
    """Placeholders, per-token arguments and positions of a foundation, as data workers need them (picklable)."""
    return NativeInputs(
        placeholders=discovery.token_ids,
        token_inputs=discovery.extras.names,
        positions=SamplePositions(discovery.positions),
        token_types=discovery.extras,
        in_forward=frozenset(discovery.in_forward),
        forward_arguments=discovery.forward_arguments,
        refused=discovery.refused,
    )


@dataclass(frozen=True)
class SamplePositions:
    """Position ids of a sample from the features of its items.

    Attributes:
        function: the model's own.
    """

    function: PositionFunction

    def __call__(
        self,
        input_ids: np.ndarray,
        token_inputs: Mapping[str, np.ndarray],
        features: Mapping[str, Sequence[Features]],
        *,
        audio_in_video: bool,
    ) -> np.ndarray:
        """See :class:`omnitrain.data.native.PositionFunction`."""
        joined: dict[str, Any] = {}
        for items in features.values():
            for name in dict.fromkeys(name for item in items for name in item):
                arrays = [item[name] for item in items if name in item]
                if not _is_content(arrays[0]):
                    joined[name] = _concatenated(arrays)
        if audio_in_video:
            joined["use_audio_in_video"] = True
        return self.function(input_ids, joined, token_inputs)


def _is_content(array: np.ndarray) -> bool:
    """Pixels and spectrograms, which no position depends on; grids, lengths, times and masks are what counts."""
    return array.ndim > 1 and np.issubdtype(array.dtype, np.floating)


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Along axis 0; masks of unequal length are filled up with zeros behind."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    return np.concatenate([np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in arrays])
