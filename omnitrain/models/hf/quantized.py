"""Quantized checkpoints, and what transformers makes of their tensors when it dequantizes them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from omnitrain.errors import UserError
from omnitrain.models.hf.stored_tensor import operations_recorded, weights_left_in_files

QUANTIZATION = "quantization_config"  # a key of the config
_DEQUANTIZE = "dequantize"  # a key inside it


def dequantizing(path: str) -> dict[str, Any] | None:
    """Return the quantization config of a folder or Hub id, so that transformers dequantizes; None: not quantized.

    Raises:
        UserError: transformers cannot dequantize the weights.
    """
    quantization = PreTrainedConfig.get_config_dict(path)[0].get(QUANTIZATION)
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or _DEQUANTIZE not in inspect.signature(kind).parameters:
        raise UserError(
            f"the weights at {path!r} are quantized ({method}), and transformers cannot dequantize them when loading; "
            "name the original model, without quantization"
        )
    return quantization | {_DEQUANTIZE: True}


class Dequantizer:
    """Dequantizes tensors of a checkpoint without its model.

    Args:
        quantization: see :func:`dequantizing`.
        dtype: dtype of dequantized tensors.
    """

    def __init__(self, quantization: dict[str, Any], dtype: torch.dtype) -> None:
        self._quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        self._dtype = dtype

    def parts(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Group names of stored tensors: name of a dequantized tensor -> last name of a part -> its name."""
        dequantized = {part: name for name, parts in self._quantizer.serialized_names.items() for part in parts}
        parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name in names:
            stem, dot, last = name.rpartition(".")
            parts[f"{stem}{dot}{dequantized.get(last, last)}"][last] = name
        return parts

    def dequantized(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor that ``parts`` stand for; nothing is computed if they are in files.

        Raises:
            UserError: transformers cannot dequantize it alone.
        """
        last = name.rpartition(".")[2]
        if set(parts) == {last}:
            return parts[last]
        target = _AnyModel(self._dtype)
        try:
            with weights_left_in_files(), operations_recorded():
                conversion = next(
                    each for each in self._quantizer.get_weight_conversions() if last in each.target_patterns
                )
                converted = conversion.operations[0].convert(
                    {part: [tensor] for part, tensor in parts.items()},
                    source_patterns=conversion.source_patterns,
                    target_patterns=conversion.target_patterns,
                    full_layer_name=name,
                    model=target,
                )
            return converted[name].detach()
        except Exception as error:  # each format fails differently
            raise UserError(f"transformers cannot dequantize {name} alone: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class _AnyModel:
    """What transformers reads of a model when it dequantizes: the dtype of the parameter."""

    dtype: torch.dtype

    def get_submodule(self, name: str) -> _AnyModel:
        return self

    def __getattr__(self, name: str) -> Tensor:
        return torch.empty(0, dtype=self.dtype)
