"""Checkpoints whose config ties the head to the embeddings, and whose files have different weights for both.

Adapters of both, merged by other tools, leave such files. transformers loads them untied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import WeightsError
from omnitrain.models.hf.stored_tensor import stored_tensors
from omnitrain.models.hf.stored_values import FILES
from omnitrain.transformers_private import tied_weights

OWN_HEAD = (
    "the foundation's config ties its head to the embeddings, but its checkpoint has different weights for both: both "
    "are trained, and saved models have `tie_word_embeddings: false`"
)

_ROWS = 4096


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether a config ties the head to the embeddings; not all have the key."""
    return bool(getattr(config, "tie_word_embeddings", False))


def untie_as_in_files(config: PreTrainedConfig, kind: type[PreTrainedModel], path: str) -> bool:
    """Let ``config`` not tie the head if the files have a head of its own, and return whether they have.

    Equal copies stay tied. Only safetensors files at ``path`` (folder or Hub id) that are on this machine are read.
    """
    pairs = tied_weights(kind)
    if not is_tied(config) or not isinstance(pairs, Mapping) or len(pairs) != 1:
        return False
    tensors = stored_tensors(_files(path))
    # In files of older classes, other modules are around the one that has the weight.
    ends = [".".join(name.rsplit(".", 2)[-2:]) for name in next(iter(pairs.items()))]
    found = [[name for name in tensors if f".{name}".endswith(f".{end}")] for end in ends]
    has_own = False
    if all(len(names) == 1 for names in found):
        one, other = (tensors[name] for (name,) in found)
        parts = zip(one.split(_ROWS), other.split(_ROWS), strict=False)
        has_own = one.shape != other.shape or any(not torch.equal(a, b.to(a.dtype)) for a, b in parts)
    FILES.close()
    if has_own:
        for part in (config, config.get_text_config(decoder=True)):  # some classes copy the text model's to the whole
            part.tie_word_embeddings = False
    return has_own


def require_tied(model: PreTrainedModel, path: str) -> None:
    """Raise WeightsError if a loaded model does not tie what its config says: the weights differ in the files."""
    lost = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    if lost:
        raise WeightsError(
            f"the config at {path!r} ties {', '.join(sorted(lost))} to other weights, but the files have different "
            "values for both; set `tie_word_embeddings: false` in its config.json, also in its `text_config` if it "
            "has one"
        )


def _files(path: str) -> list[str]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, allow_patterns="*.safetensors", local_files_only=True))
        except (OSError, ValueError):  # not downloaded yet
            return []
    return sorted(map(str, folder.glob("*.safetensors")))
