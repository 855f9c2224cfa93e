"""Which conversions read experts that a checkpoint has apart; what they read is tested with exports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from omnitrain.models.hf.conversions import with_experts_apart
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES

APART = ["model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.0.down_proj.weight"]
FUSED = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]


def fused() -> nn.Module:
    with torch.device("meta"):
        return foundation_class(FAMILIES["qwen3_vl_moe"]())(FAMILIES["qwen3_vl_moe"]())


def of_single_experts() -> nn.Module:
    return nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})})


@pytest.mark.parametrize(
    ("model", "known", "names", "is_changed"),
    [
        (fused, "qwen3_vl_moe", APART, True),
        (fused, "qwen3_vl_moe", FUSED, False),
        (fused, "qwen2_moe", APART, False),  # reads them itself
        (of_single_experts, "qwen3_vl_moe", APART, False),
    ],
)
def test_experts_are_converted_if_the_checkpoint_has_them_apart_and_only_the_model_together(
    model: Callable[[], nn.Module], known: str, names: list[str], is_changed: bool
) -> None:
    before = get_checkpoint_conversion_mapping(known)
    found = with_experts_apart(before, names, model())
    sources = [source for each in found for source in each.source_patterns]
    assert (found != before) == is_changed
    assert any("experts.*.gate_proj" in source for source in sources) == (is_changed or known == "qwen2_moe")
