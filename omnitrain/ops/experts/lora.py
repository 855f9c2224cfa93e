"""LoRA on fused experts: two thin grouped products beside each frozen one, on the rank that has the expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SCALES = "_lora_scales"


@dataclass(frozen=True)
class ExpertAdapter:
    """What is trained beside the matrices ``[out, in]`` of experts, in whatever order these are stored.

    Attributes:
        a: ``[E, r, in]``.
        b: ``[E, out, r]``.
        scale: of the product ``b @ a``.
    """

    a: Tensor
    b: Tensor
    scale: float


def parameter_names(weight: str) -> tuple[str, str]:
    """Names of the ``A`` and ``B`` beside the parameter ``weight``."""
    return f"{weight}_lora_A", f"{weight}_lora_B"


def add_expert_adapter(module: nn.Module, weight: str, rank: int, scale: float) -> None:
    """Register fp32 adapters of zeros beside the parameter ``weight`` of the experts ``module``."""
    matrices = module.get_parameter(weight)
    num_experts, *sizes = matrices.shape
    out_size, in_size = reversed(sizes) if module.is_transposed else sizes
    for name, shape in zip(parameter_names(weight), ((rank, in_size), (out_size, rank)), strict=True):
        zeros = matrices.new_zeros(num_experts, *shape, dtype=torch.float32)
        module.register_parameter(name, nn.Parameter(zeros))
    setattr(module, _SCALES, {**getattr(module, _SCALES, {}), weight: scale})


@torch.no_grad()
def merge_expert_adapter(module: nn.Module, weight: str, dtype: torch.dtype | None = None) -> None:
    """Add the adapters beside the parameter ``weight`` to it, in fp32, and remove them.

    Args:
        module: experts that have them.
        weight: name of the parameter, ``[E, out, in]`` (``[E, in, out]`` where ``module.is_transposed``).
        dtype: that it gets; None: it keeps its own.
    """
    matrices = module.get_parameter(weight)
    scales = dict(adapter_scales(module))
    a, b = (module.get_parameter(name) for name in parameter_names(weight))
    merged = torch.empty_like(matrices, dtype=dtype)
    for expert, (frozen, first, second) in enumerate(zip(matrices, a, b, strict=True)):
        delta = scales[weight] * (second @ first)
        merged[expert] = frozen.float() + (delta.mT if module.is_transposed else delta)
    matrices.data = merged
    for name in parameter_names(weight):
        delattr(module, name)
    del scales[weight]
    setattr(module, _SCALES, scales)


def adapter_scales(module: nn.Module) -> dict[str, float]:
    """Names of the parameters of experts that have adapters, and their scales."""
    return getattr(module, _SCALES, {})


def adapter_names(module: nn.Module) -> Iterator[str]:
    """Names of the adapters beside the parameters of experts; each has an expert per entry of its dim 0."""
    return (name for weight in adapter_scales(module) for name in parameter_names(weight))
