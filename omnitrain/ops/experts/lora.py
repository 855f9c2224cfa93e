"""LoRA on fused experts: two low-rank grouped matmuls next to each frozen one, on the rank that has the expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SCALES = "_lora_scales"


@dataclass(frozen=True)
class ExpertAdapter:
    """The adapter of experts' matrices ``[out, in]``, whether these are stored transposed or not."""

    a: Tensor  # [E, r, in]
    b: Tensor  # [E, out, r]
    scale: float  # factor on b @ a


def parameter_names(weight: str) -> tuple[str, str]:
    """Return the names of ``A`` and ``B`` of the parameter ``weight``."""
    return f"{weight}_lora_A", f"{weight}_lora_B"


def add_expert_adapter(module: nn.Module, weight: str, rank: int, scale: float) -> None:
    """Register fp32 adapters of zeros for the parameter ``weight`` of the experts ``module``."""
    matrices = module.get_parameter(weight)
    num_experts, *sizes = matrices.shape
    out_size, in_size = reversed(sizes) if module.is_transposed else sizes
    for name, shape in zip(parameter_names(weight), ((rank, in_size), (out_size, rank)), strict=True):
        zeros = matrices.new_zeros(num_experts, *shape, dtype=torch.float32)
        module.register_parameter(name, nn.Parameter(zeros))
    setattr(module, _SCALES, {**getattr(module, _SCALES, {}), weight: scale})


@torch.no_grad()
def merge_expert_adapter(module: nn.Module, weight: str, dtype: torch.dtype | None = None) -> None:
    """Add the adapters of the experts' parameter ``weight`` to it, in fp32, and remove them; ``dtype``: of the sum."""
    matrices = module.get_parameter(weight)
    scales = dict(adapter_scales(module))
    a, b = (module.get_parameter(name) for name in parameter_names(weight))
    merged = []
    for frozen, first, second in zip(matrices, a, b, strict=True):
        delta = scales[weight] * (second @ first)
        of_expert = frozen.float() + (delta.mT if module.is_transposed else delta)
        merged.append(of_expert.to(dtype or matrices.dtype))
    matrices.data = torch.stack(merged)
    for name in parameter_names(weight):
        delattr(module, name)
    del scales[weight]
    setattr(module, _SCALES, scales)


def adapter_scales(module: nn.Module) -> dict[str, float]:
    """Return the experts' parameters with adapters -> the adapters' scales."""
    return getattr(module, _SCALES, {})


def adapter_names(module: nn.Module) -> Iterator[str]:
    """Return the names of the experts' adapters; dim 0 of each is the expert."""
    return (name for weight in adapter_scales(module) for name in parameter_names(weight))
