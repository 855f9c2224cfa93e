"""Which token stands for a row of a modality, and the per-token extras that a forward asks for beside the ids."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.native.geometry import config_nodes

MODALITY_CODES = {"image": 1, "video": 2, "audio": 3}
"""Values of ``mm_token_type_ids`` in all of transformers; 0 is text."""

_EXTRAS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
_STEMS = {
    "image": ("image", "img", "media", "vision"),
    "video": ("video", "media", "image"),
    "audio": ("audio", "sound", "speech"),
}
_FORMS = ("{}_token_id", "{}_token_index", "{}_placeholder_id", "{}_placeholder_token_id", "{}_soft_token_id")


def token_ids(config: PreTrainedConfig, modality: str) -> Iterator[int]:
    """Ids that may be the modality's placeholder, the likeliest first (videos of some models are marked as images)."""
    seen: set[int] = set()
    for stem in _STEMS[modality]:
        for form in _FORMS:
            for _, node in config_nodes(config):
                value = getattr(node, form.format(stem), None)
                if isinstance(value, int) and value >= 0 and value not in seen:
                    seen.add(value)
                    yield value


def special_ids(config: PreTrainedConfig) -> set[int]:
    """All token ids that the config names, which ordinary text does not hold."""
    found: set[int] = set()
    for _, node in config_nodes(config):
        for name, value in vars(node).items():
            if name.endswith(("_id", "_index", "_ids")):
                found |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int)}
    return found


def extra_arguments(model: PreTrainedModel) -> tuple[str, ...]:
    """Per-token arguments that the model's forward takes beside ids and positions."""
    parameters = inspect.signature(type(model).forward).parameters
    return tuple(name for name in _EXTRAS if name in parameters)


def token_types(ids: np.ndarray[Any, Any], tokens: Mapping[str, int]) -> np.ndarray[Any, Any]:
    """Modality of every token.

    Args:
        ids: [T] integers.
        tokens: modality -> id of its placeholder.

    Returns:
        [T] int64: 0 text, 1 image, 2 video, 3 audio.
    """
    types = np.zeros(ids.shape, dtype=np.int64)
    for modality, token in tokens.items():
        types[ids == token] = MODALITY_CODES[modality]
    return types
