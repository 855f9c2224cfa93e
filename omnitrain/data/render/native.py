"""How to prepare the native media of a foundation. No weights, only rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from omnitrain.data.packing.sample import Grid


@dataclass(frozen=True)
class NativeInputs:
    """How a foundation reads its native media."""

    placeholders: Mapping[str, int] = field(default_factory=dict)  # modality -> id of its placeholder token
    token_inputs: tuple[str, ...] = ()  # names of the foundation's per-token arguments that every sample must have
    # (input_ids, token_inputs, modality -> features of each item, audio_in_video=...) -> position_ids, ``[T]`` or
    # ``[axes, T]`` int64, as many axes for all samples; None: 0, 1, 2, ...
    positions: Callable[..., np.ndarray] | None = None
    # (grid of written media) -> ``[axes, n + 1]``, positions of its n tokens and of the next one, from 0; None: as text
    grid_positions: Callable[[Grid], np.ndarray | None] | None = None
    # (input_ids, loss_mask) -> values of `token_inputs`, ``[T]`` each; None: the processor's, which mark modalities
    token_types: Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]] | None = None
    in_forward: frozenset[str] = frozenset()  # modalities that only the foundation's own forward reads
    forward_arguments: frozenset[str] = frozenset()  # of the foundation's forward and feature methods, besides ids
    refused: Mapping[str, str] = field(default_factory=dict)  # modality that it could read, but not here -> why
    media_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modality -> the forward's arguments
    written: frozenset[str] = frozenset()  # modalities that it writes, too: their codes are words of its vocabulary
    unwritten: Mapping[str, str] = field(default_factory=dict)  # modality that it could write, but not here -> why
    video_marks: tuple[int, int] | None = None  # ids around a video, if videos and images have one placeholder

    @property
    def modalities(self) -> frozenset[str]:
        """The modalities that it reads."""
        return self.in_forward | self.placeholders.keys()

    def without_forward(self, reasons: Mapping[str, str]) -> NativeInputs:
        """Return a copy that refuses some of the ``in_forward`` modalities. ``reasons``: modality -> why."""
        return replace(self, in_forward=self.in_forward - reasons.keys(), refused={**self.refused, **reasons})

    def without_words(self, reason: str) -> NativeInputs:
        """Return a copy that writes nothing, for this reason."""
        return replace(self, written=frozenset(), unwritten=dict.fromkeys(self.written, reason))


def unpassed(given: Mapping[str, Any], passed: Collection[str], taken: Collection[str]) -> list[str]:
    """Return names of a sample's arguments that are ``taken``, or media, and not ``passed``; full masks aside."""
    lost = {name: value for name, value in given.items() if value is not None and name not in passed}
    return sorted(name for name, value in lost.items() if _says_something(value, is_taken=name in taken))


def _says_something(value: Any, *, is_taken: bool) -> bool:
    try:
        array = np.asarray(value)
    except ValueError:  # arrays of different shapes
        return True
    if is_taken:
        return array.dtype.kind != "b" or array.ndim == 0 or not array.all()
    return array.ndim > 1 and array.dtype.kind == "f"  # pixels or a spectrogram
