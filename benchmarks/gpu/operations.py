"""Floating point operations of a step.

A step's are counted for real tokens alone, and never for recomputation: ``6 x block parameters x tokens + 6 x
vocabulary x hidden x predicted tokens + 6 x layers x heads x head_dim x sum(length^2)`` (causal: half of all pairs) for
the language model; ``6 x tower parameters x patches + 6 x merger parameters x image tokens + 12 x depth x hidden x
sum(patches of an image^2)`` for the tower. Parameters are those of matrices, of experts those that a token goes to.
Rows of the last layer that no head reads count, too, although omnitrain may leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import IGNORED


def operations(config: Any, model: PreTrainedModel, samples: Sequence[dict[str, Any]]) -> float:
    """Return the operations of forward and backward of these samples; see the head of this file."""
    text = getattr(config, "text_config", config)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim >= 2}
    blocks = sum(n for name, n in matrices.items() if ".layers." in name and ".experts." not in name)
    experts = sum(n for name, n in matrices.items() if ".experts." in name)
    if experts:
        blocks += experts * text.num_experts_per_tok // text.num_experts
    tower = sum(n for name, n in matrices.items() if ".visual.blocks." in name or ".visual.patch_embed." in name)
    mergers = sum(n for name, n in matrices.items() if ".visual." in name and "merger" in name)
    attended = text.num_hidden_layers * text.num_attention_heads * text.head_dim
    total = 0.0
    for sample in samples:
        length, predicted = len(sample["input_ids"]), int((sample["labels"][1:] != IGNORED).sum())
        total += 6 * blocks * length + 6 * text.vocab_size * text.hidden_size * predicted + 6 * attended * length**2
        for patches in sample.get("image_grid_thw", torch.zeros(0, 3)).prod(-1).tolist():
            vision = config.vision_config
            total += 6 * tower * patches + 6 * mergers * patches / vision.spatial_merge_size**2
            total += 12 * vision.depth * vision.hidden_size * patches**2
    return total
