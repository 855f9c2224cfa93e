"""What a foundation that reads media by itself offers to the data side: no weights, only rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from omnitrain.data.sample import Features


class PositionFunction(Protocol):
    """Position ids of one sample, as the foundation's own function makes them."""

    def __call__(
        self,
        input_ids: np.ndarray,
        token_inputs: Mapping[str, np.ndarray],
        features: Mapping[str, Sequence[Features]],
        *,
        audio_in_video: bool,
    ) -> np.ndarray:
        """Position ids.

        Args:
            input_ids: ``[T]`` int64.
            token_inputs: ``[T]`` each; see :attr:`Sample.token_inputs`.
            features: modality -> features of each item, in the order in which they appear; absent: none.
            audio_in_video: the tokens of the videos' sound lie among those of their pictures.

        Returns:
            ``[T]`` or ``[axes, T]`` int64; the axes do not depend on the sample.
        """
        ...


@dataclass(frozen=True)
class NativeInputs:
    """How a foundation reads media by itself.

    Attributes:
        placeholders: modality -> id of the tokens that its rows fill.
        token_inputs: names of the foundation's per-token arguments that every sample must bring.
        token_types: ``(input_ids, loss_mask) -> values`` of these arguments, ``[T]`` each; None: the processor's own,
            which tell modalities apart.
        positions: position ids of a sample; None: 0, 1, 2, ...
        in_forward: modalities that only the foundation's own forward reads, with all that its processor returns.
        forward_arguments: what of the processor's output that forward takes.
        refused: modality that the foundation has a way to read, which cannot be used -> why.
    """

    placeholders: Mapping[str, int]
    token_inputs: tuple[str, ...] = ()
    positions: PositionFunction | None = None
    token_types: Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]] | None = None
    in_forward: frozenset[str] = frozenset()
    forward_arguments: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)

    def without_forward(self, reasons: Mapping[str, str]) -> NativeInputs:
        """The same, without some of the modalities that only the forward reads. ``reasons``: modality -> why."""
        return replace(self, in_forward=self.in_forward - reasons.keys(), refused={**self.refused, **reasons})
