"""Find the tower in an HF model: the model itself, or the encoder of a larger model (CLIP, Whisper, Qwen-VL)."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.hf.load import Source, model_class, resolve
from omnitrain.models.hf.stored_tensor import read_weights, weights_left_in_files


def tower_from_source(source: Source, modality: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the tower of a model for ``modality``; ``source`` as in :func:`omnitrain.models.hf.load.resolve`.

    Weights of other parts of the model are not read. Raises UserError: the model has no encoder for the modality.
    """
    with weights_left_in_files():
        tower = _tower_of(resolve(source, dtype=dtype), modality)
    read_weights(tower)
    return tower


def tower_from_config(config: PreTrainedConfig, modality: str) -> PreTrainedModel:
    """Build a tower with random weights."""
    return _tower_of(model_class(config)(config), modality)


def _tower_of(model: PreTrainedModel, modality: str) -> PreTrainedModel:
    is_whole = model.config.is_encoder_decoder or bool(model.config.sub_configs)
    if not is_whole:
        return model
    tower = model.get_encoder() if model.config.is_encoder_decoder else model.get_encoder(modality)
    if tower is None or tower is model:
        raise UserError(f"{type(model).__name__} has no {modality} encoder: its `get_encoder` returns none")
    return tower
