"""Compute position ids of a sample by the model's own function, in data workers, on an instance without weights."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.discovery.geometry import config_nodes

METHODS = ("compute_3d_position_ids", "get_rope_index")
"""Names of the methods with which models compute positions of media, the likeliest first."""

_Array: TypeAlias = np.ndarray[Any, Any]
_ALIASES = (
    ("second_per_grid_ts", "second_per_grids", "video_second_per_grid"),
    ("audio_seqlens", "audio_feature_lengths"),
)
_LENGTH_MASKS = ("feature_attention_mask", "input_features_mask")
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")


@dataclass(frozen=True)
class PositionFunction:
    """Computes the position ids of one sample as the model would, by an instance without weights; can be pickled."""

    model: type[PreTrainedModel]  # class of the model
    # its config as JSON (with ``model_type``); None: positions are a plain count, with or without media
    config: str | None
    axes: int = 0  # number of rows of the result; 0: the result is ``[T]``
    start: int = 0  # first position

    def __call__(self, ids: _Array, features: Mapping[str, Any], extras: Mapping[str, _Array]) -> _Array:
        """Return the position ids of one sample, ``[axes, T]`` or ``[T]``, int64.

        ``ids``: ``[T]``. ``features``: the forward's media arguments of this sample alone (grids, lengths, masks, ...),
        numpy or torch. ``extras``: its per-token arguments, of ``TokenExtras``. Raises UserError: the model's function
        refuses these media; the message quotes its error.
        """
        plain = np.arange(self.start, self.start + ids.size, dtype=np.int64)
        if self.config is None:
            return plain
        positions = self._own(torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], features, extras)
        if positions is None:
            return np.broadcast_to(plain, (self.axes, ids.size)).copy() if self.axes else plain
        return positions.reshape(*positions.shape[:-2], ids.size).numpy().astype(np.int64)

    def _own(self, ids: Tensor, features: Mapping[str, Any], extras: Mapping[str, _Array]) -> Tensor | None:
        assert self.config is not None
        function = _function(cast(Hashable, self.model), self.config)
        known = {name: torch.as_tensor(value) for name, value in features.items() if value is not None}
        known |= {name: torch.as_tensor(value)[None] for name, value in extras.items()}
        known |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "inputs_embeds": torch.empty(*ids.shape, 1)}
        arguments: dict[str, Tensor | None] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            value = _named(name, known)
            if value is not None:
                arguments[name] = value
            elif parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                arguments[name] = None
        try:
            result = function(**arguments)
        except (StopIteration, RuntimeError, IndexError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.model.__name__} cannot compute positions for this sample's media "
                f"({type(error).__name__}: {error}); it got {', '.join(sorted(features)) or 'none'}"
            ) from error
        return result[0] if isinstance(result, tuple) else result


def own_function(model: PreTrainedModel) -> Any:
    """Return the model's method that computes positions of media, or None."""
    methods = ((module, name) for name in METHODS for module in model.modules() if hasattr(type(module), name))
    return next((getattr(module, name) for module, name in methods), None)


@functools.lru_cache(maxsize=4)
def _function(model: Any, config: str) -> Any:
    values = json.loads(config)
    full = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        try:
            instance = model(_shallow(full))
        except Exception:  # some models require the full depth
            instance = model(copy.deepcopy(full))
    return own_function(instance)


def _shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Reduce all towers and decoders to one layer: positions do not depend on depth, and it builds ten times faster."""
    config = copy.deepcopy(config)
    for node in config_nodes(config):
        for name in _DEPTHS:
            if isinstance(getattr(node, name, None), int):
                setattr(node, name, 1)
        if isinstance(getattr(node, "layer_types", None), list):
            node.layer_types = node.layer_types[:1]
    return config


def _named(name: str, known: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a parameter: by its name, by an alias, or as the lengths of a mask."""
    names = [name, *(other for alias in _ALIASES if name in alias for other in alias)]
    masks = [known[mask] for mask in _LENGTH_MASKS if mask in known and name in _ALIASES[1]]
    values = (known[candidate] for candidate in names if candidate in known)
    return next(values, masks[0].sum(-1).long() if masks else None)
