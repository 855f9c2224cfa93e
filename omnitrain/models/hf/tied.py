"""Checkpoints whose config ties the head to the embeddings, and whose files have different weights for both.

Adapters of both, merged by other tools, leave such files. transformers loads them untied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
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
    ``config``, and the config of the text model in it, are changed in place; ``kind`` builds it.
    """
    pairs = tied_weights(kind)
    if not is_tied(config) or not isinstance(pairs, Mapping) or len(pairs) != 1:
        return False
    tensors = stored_tensors(_files(path))
    found = [_ending_like(name, tensors) for name in next(iter(pairs.items()))]
    has_own = all(len(names) == 1 for names in found) and _differ(*(tensors[name] for (name,) in found))
    FILES.close()
    if has_own:
        for part in (config, config.get_text_config(decoder=True)):  # some classes copy the text model's to the whole
            part.tie_word_embeddings = False
    return has_own


def require_tied(model: PreTrainedModel, path: str) -> None:
    """Check that a loaded model ties what its config says.

    Raises WeightsError: transformers left weights untied, which differ in the files.
    """
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


def _ending_like(name: str, tensors: Mapping[str, Tensor]) -> Sequence[str]:
    """The names of tensors that are called so in their module; files of older classes have other modules around it."""
    end = ".".join(name.rsplit(".", 2)[-2:])
    return [stored for stored in tensors if f".{stored}".endswith(f".{end}")]


def _differ(one: Tensor, other: Tensor) -> bool:
    parts = zip(one.split(_ROWS), other.split(_ROWS), strict=False)
    return one.shape != other.shape or any(not torch.equal(a, b.to(a.dtype)) for a, b in parts)
