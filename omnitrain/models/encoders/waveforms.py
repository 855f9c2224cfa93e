"""Run HF towers that read sound as a waveform (wav2vec2, HuBERT, WavLM), on clips of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import Features
from omnitrain.models.components.protocols import TensorFeatures
from omnitrain.models.encoders.towers import WAVEFORM, merge_frames


def clip_features(
    kind: str, values: np.ndarray, num_frames: int, merge: int, *, is_padded: bool
) -> tuple[Features, int]:
    """Return what :func:`merged_frames` needs of one clip ``values [n]`` fp32, and its number of tokens.

    ``kind``: the tower's class, for errors; ``is_padded``: see :func:`takes_padding`;
    clips without padding share a call if they have one length.

    Raises:
        ValueError: the clip is too short.
    """
    if num_frames < 1:
        raise ValueError(f"a clip of {len(values)} samples is too short for {kind}")
    num_tokens = -(-num_frames // merge)
    features: Features = {"num_frames": np.array([num_frames]), "num_rows": np.array([num_tokens])}
    if not is_padded:
        return {WAVEFORM: values[None], **features}, num_tokens
    return {WAVEFORM: values, "num_samples": np.array([len(values)]), **features}, num_tokens


def takes_padding(tower: PreTrainedModel) -> bool:
    """Return whether the frames of a clip do not depend on the padding behind it.

    Group norm takes the mean over it. Transformers sets frames of padding to zero before the first convolution over
    frames, the one of positions; further ones see what that one made of them.
    """
    modules = dict(tower.named_modules())
    over_frames = [name for name, module in modules.items() if isinstance(module, nn.Conv1d)]
    later = [name for name in over_frames if not name.startswith("feature_extractor.")]
    return len(later) <= 1 and not any(isinstance(module, nn.GroupNorm) for module in modules.values())


def merged_frames(tower: PreTrainedModel, features: TensorFeatures, factor: int) -> torch.Tensor:
    """Return the joined frames ``[clips, frames, factor * width]``; those after the end of a clip are zero."""
    waves, arguments = features[WAVEFORM].to(tower.dtype), dict[str, Any]()
    if waves.ndim == 1:
        waves = pad_sequence(waves.split(features["num_samples"].tolist()), batch_first=True)
        arguments["attention_mask"] = _before(features["num_samples"], waves).long()
    output = tower(waves, **arguments).last_hidden_state
    return merge_frames(output * _before(features["num_frames"], output)[..., None], factor)


def _before(counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[clips, length]``: whether an index of dim 1 of ``rows`` is below the clip's count."""
    return torch.arange(rows.size(1), device=rows.device) < counts[:, None]
