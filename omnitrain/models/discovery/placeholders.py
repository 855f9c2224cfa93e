"""Find the placeholder token of a modality, and the per-token arguments that a forward takes besides the ids."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery.geometry import config_nodes

_Ids: TypeAlias = np.ndarray[Any, Any]

MODALITY_CODES = {"image": 1, "video": 2, "audio": 3}
"""Values of ``mm_token_type_ids`` in all of transformers; 0 is text."""

_EXTRAS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
_MARKS = (("start_token_id", "end_token_id"), ("bos_token_id", "eos_token_id"), ("start_id", "end_id"))
_STEMS = {
    "image": ("image", "img", "media", "vision"),
    "video": ("video", "media", "image"),
    "audio": ("audio", "sound", "speech"),
}
_FORMS = ("{}_token_id", "{}_token_index", "{}_placeholder_id", "{}_placeholder_token_id", "{}_soft_token_id")


def token_ids(config: PreTrainedConfig, modality: str, vocabulary: int) -> Iterator[int]:
    """Yield ids below ``vocabulary`` that may be the placeholder, the likeliest first; also the images' placeholder."""
    names = [form.format(stem) for stem in _STEMS[modality] for form in _FORMS]
    values = [getattr(node, name, None) for name in names for node in config_nodes(config)]
    yield from dict.fromkeys(value for value in values if isinstance(value, int) and 0 <= value < vocabulary)


def special_ids(config: PreTrainedConfig) -> set[int]:
    """Return all token ids that the config names; ordinary text does not contain them."""
    ids: set[int] = set()
    for node in config_nodes(config):
        for name, value in vars(node).items():
            if name.endswith(("_id", "_index", "_ids")):
                ids |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int)}
    return ids


def extra_arguments(model_class: type[PreTrainedModel]) -> tuple[str, ...]:
    """Return the names of per-token arguments that the forward takes besides ids and positions."""
    parameters = inspect.signature(model_class.forward).parameters
    return tuple(name for name in _EXTRAS if name in parameters)


@dataclass(frozen=True)
class TokenExtras:
    """Computes the per-token arguments that a model's forward takes besides ids and positions."""

    names: tuple[str, ...]  # names of these arguments; often none
    tokens: dict[str, int]  # modality -> id of its placeholder
    video_marks: tuple[int, int] | None = None  # ids around a video, for one placeholder for videos and images
    marks_answer: bool = False  # they tell prompt (0) from answer (1), not modalities; the prompt has full attention

    def __call__(self, ids: _Ids, answer: _Ids | None = None) -> dict[str, _Ids]:
        """Return argument -> ``[T]`` int64 for ids ``[T]``; ``answer``: ``[T]`` bool, the supervised tokens."""
        if not self.names:
            return {}
        if not self.marks_answer:
            types = self.modalities(ids)
        elif answer is None or not answer.any():
            types = np.zeros(ids.shape, dtype=np.int64)
        else:
            types = (np.arange(ids.size) >= int(np.argmax(answer))).astype(np.int64)
        return dict.fromkeys(self.names, types)

    def modalities(self, ids: _Ids) -> _Ids:
        """Return :data:`MODALITY_CODES` ``[T]`` int64 of the placeholders in ``ids`` ``[T]``; 0 for other tokens."""
        types = np.zeros(ids.shape, dtype=np.int64)
        for modality in ("audio", "video", "image"):
            if modality in self.tokens:
                types[ids == self.tokens[modality]] = MODALITY_CODES[modality]
        if self.video_marks is not None:
            opened = np.cumsum(ids == self.video_marks[0]) > np.cumsum(ids == self.video_marks[1])
            types[opened & (ids == self.tokens["video"])] = MODALITY_CODES["video"]
        return types


def marks(config: PreTrainedConfig, modality: str) -> tuple[int, int] | None:
    """Return the ids before and after an item's placeholders, if the config names them."""
    stems = (modality,) if modality == "audio" else (modality, "vision")
    for stem, pair in product(stems, _MARKS):
        named = [[getattr(node, f"{stem}_{name}", None) for node in config_nodes(config)] for name in pair]
        first, last = (next((value for value in values if isinstance(value, int)), None) for values in named)
        if first is not None and last is not None:
            return first, last
    return None


def video_marks(config: PreTrainedConfig, tokens: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the ids at the start and end of a video, if videos and images have the same placeholder."""
    if "video" not in tokens or tokens["video"] != tokens.get("image"):
        return None
    return marks(config, "video")
