"""Choose the backend that computes the experts of a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from omnitrain.errors import UserError
from omnitrain.ops.experts.grouped_mm import ProductMemory, grouped_experts
from omnitrain.ops.experts.permute import counts_of
from omnitrain.ops.experts.weights import ExpertWeights
from omnitrain.ops.registry import Backend, choose

AUTO = "auto"


def _by_transformers(name: str, experts: ExpertWeights, rows: Tensor, ends: Tensor, memory: ProductMemory) -> Tensor:
    """Run a function that transformers registers; each row has one expert with weight 1."""
    if experts.first_adapter or experts.down_adapter:
        raise UserError(f"experts backend {name!r} does not support LoRA adapters; use torch")
    if memory != ProductMemory():
        raise UserError(f"experts backend {name!r} does not support a row budget or recompute; use torch")
    if rows.size(0) == 0:  # some backends fail without rows
        return grouped_experts(experts, rows, ends, memory)
    of_row = torch.repeat_interleave(counts_of(ends), output_size=rows.size(0)).unsqueeze(-1)
    function = ALL_EXPERTS_FUNCTIONS[name]
    return function(experts, rows, of_row, rows.new_ones(of_row.shape))


def _cuda_only(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"runs only on CUDA, not on {device.type}"


EXPERTS = (
    Backend("torch", grouped_experts),
    Backend("grouped_mm", partial(_by_transformers, "grouped_mm"), automatic=()),
    Backend("batched_mm", partial(_by_transformers, "batched_mm"), automatic=()),
    Backend("sonicmoe", partial(_by_transformers, "sonicmoe"), _cuda_only, automatic=()),
    Backend("deepgemm", partial(_by_transformers, "deepgemm"), _cuda_only, automatic=()),
)
"""``torch`` is omnitrain's function; the other names are transformers'."""

_chosen: dict[tuple[Any, ...], Backend] = {}


def chosen(module: nn.Module, rows: Tensor, asked: str) -> Backend:
    """Return the backend named ``asked`` for ``module`` on ``rows``; a UserError names those that can run there."""
    key = (type(module).__name__, asked, rows.device.type, rows.dtype)
    if key not in _chosen:
        _chosen[key] = choose("experts", EXPERTS, asked, rows.device)
    return _chosen[key]
