"""Quantized checkpoints, and what transformers makes of their tensors when it dequantizes them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from omnitrain.errors import UserError
from omnitrain.models.hf.stored_tensor import operations_recorded, weights_left_in_files
from omnitrain.transformers_private import dequantizing_through

QUANTIZATION = "quantization_config"  # a key of the config
_DEQUANTIZE = "dequantize"  # a key inside it


def dequantizing(path: str) -> dict[str, Any] | None:
    """Return the quantization config of files that transformers can dequantize, else UserError; None: not quantized."""
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


@contextmanager
def partial_blocks_are_dequantized() -> Iterator[None]:
    """Within this context, transformers dequantizes fp8 matrices with partial last blocks."""

    def of_full_blocks(
        dequantize: Any, self: Any, matrix: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        size = self.hf_quantizer.quantization_config.weight_block_size
        if matrix.dtype != torch.float8_e4m3fn or size is None or scales.ndim < 2:
            return dequantize(self, matrix, scales, output_dtype)
        sizes = list(zip(matrix.shape[-2:], scales.shape[-2:], size, strict=True))
        is_in_blocks = all(blocks == -(-length // block) for length, blocks, block in sizes)
        if not is_in_blocks or all(blocks == 1 or length % block == 0 for length, blocks, block in sizes):
            return dequantize(self, matrix, scales, output_dtype)
        (rows, row_blocks, height), (columns, column_blocks, width) = sizes
        missing = (0, column_blocks * width - columns, 0, row_blocks * height - rows)
        return dequantize(self, functional.pad(matrix.float(), missing), scales, output_dtype)[..., :rows, :columns]

    with dequantizing_through(of_full_blocks):
        yield


class Dequantizer:
    """Dequantizes tensors of a checkpoint to ``dtype`` without a model. ``quantization``: see :func:`dequantizing`."""

    def __init__(self, quantization: dict[str, Any], dtype: torch.dtype) -> None:
        self._quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        self.dtype = dtype

    def parts(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Group names of stored tensors: name of a dequantized tensor -> last name of a part -> its name."""
        dequantized = {part: name for name, parts in self._quantizer.serialized_names.items() for part in parts}
        parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name in names:
            stem, dot, last = name.rpartition(".")
            parts[f"{stem}{dot}{dequantized.get(last, last)}"][last] = name
        return parts

    def dequantized(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor of quantized ``parts``, not computed if they are in files; UserError: it cannot be."""
        last = name.rpartition(".")[2]
        with weights_left_in_files(), operations_recorded(), partial_blocks_are_dequantized():
            try:
                conversions = self._quantizer.get_weight_conversions()
                conversion = next((each for each in conversions if last in each.target_patterns), None)
                if conversion is None:
                    raise LookupError(f"it has no conversion to {last!r}")
                converted = conversion.operations[0].convert(
                    {part: [tensor] for part, tensor in parts.items()},
                    source_patterns=conversion.source_patterns,
                    target_patterns=conversion.target_patterns,
                    full_layer_name=name,
                    model=_AnyModel(self.dtype),
                )
                return converted[name].detach()
            except Exception as error:  # each format fails differently
                reason = " ".join(str(error).split())
                raise UserError(f"transformers cannot dequantize {name} alone: {reason}") from error


@dataclass(frozen=True)
class _AnyModel:
    """What transformers reads of a model when it dequantizes: the dtype of the parameter."""

    dtype: torch.dtype

    def get_submodule(self, name: str) -> _AnyModel:
        return self

    def __getattr__(self, name: str) -> Tensor:
        return torch.empty(0, dtype=self.dtype)
