"""What tests of plans run: a small text model on ranks that exist, and in a fake world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import topology_of
from omnitrain.recipe import Optimizer, parse_layout
from omnitrain.train.planning.rank_run import RankRun, Training, run_rank
from tests.tiny import MODEL, tiny_processor, tiny_samples

FOUNDATION = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGES = {"foundation": MODEL["foundation"], "encoders": {"image_encoder": MODEL["encoders"]["image_encoder"]}}


def training(config: Mapping[str, Any], tokens: int = 256, mixed: bool = True) -> Training:
    """The model of a foundation's config and a pack of one sample, or a model with encoders and a pack of images."""
    if "encoders" in config:
        model = build_omni_model(**config, init_device="meta").train()
        samples = tiny_samples(tiny_processor(model), 5, ("image_to_text", "images_to_text"))
        return Training(model, Optimizer(), mixed, Pack.from_samples(samples))
    model = build_omni_model(foundation=dict(config), init_device="meta").train()
    sample = replace(idle_prompt(model, tokens), loss_mask=np.ones(tokens, bool))
    return Training(model, Optimizer(), mixed, Pack.from_samples([sample]))


def measured(config: Mapping[str, Any], layout: str, num_packs: int, tokens: int = 256) -> RankRun:
    """Run on this rank, with weights."""
    trained, plan = training(config, tokens), parse_layout(layout).plan()
    model: OmniModel = trained.model
    model.to_empty(device="cpu")
    model.foundation.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    state = init_state_of(plan)
    model = ot.build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=True)
    packs = [trained.pack] * num_packs if dist.get_rank() in topology_of(model).readers else []
    return run_rank(model, ot.step_planner(model)(packs), trained.optimizer)
