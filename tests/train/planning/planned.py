"""What tests of plans run: a small text model on ranks that exist, and in a fake world; and what they count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.plan import topology_of
from omnitrain.recipe import Optimizer, ParallelPlan, parse_layout
from omnitrain.recipe.parallel import FOUNDATION as NAME
from omnitrain.train.planning.cells import Cell, CountedPart, Work
from omnitrain.train.planning.encoding import Encoding
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

ENCODER = "image_encoder"
ENCODER_BYTES = 1e7
KEPT = {"none": 6e6, "selective": 3e6, "full": 1e6}
REPEATED = {"none": 2.0, "selective": 2.2, "full": 3.0}


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
    trained = training(config, tokens)
    model, batch = on_this_rank(trained, parse_layout(layout).plan(), num_packs)
    return run_rank(model, batch, trained.optimizer)


def on_this_rank(trained: Training, plan: ParallelPlan, num_packs: int) -> tuple[OmniModel, StepBatch]:
    """The model with weights, parallelized, and a step of so many packs of each data-parallel rank."""
    model: OmniModel = trained.model
    model.to_empty(device="cpu")
    model.foundation.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.02)  # equal on all ranks
        for buffer in model.buffers():
            buffer.zero_()
    state = init_state_of(plan)
    mixed = trained.mixed_precision
    model = ot.build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=mixed)
    packs = [trained.pack] * num_packs if dist.get_rank() in topology_of(model).readers else []
    return model, ot.step_planner(model)(packs)


def counted(trained: Training, plan: ParallelPlan, num_ranks: int) -> Cell:
    """A cell whose blocks compute 1 TFLOP, and exchange as much as blocks do; experts are read in each pass."""
    model, own = trained.model, plan.of(NAME)
    tp, mode = own.tp or 1, own.memory.mode
    shards = num_ranks // tp
    everyone = tuple(range(0, num_ranks, tp))
    sent: Work = {Collective("all_gather", int(2e7 / tp), everyone, False): 1}
    if tp > 1:
        sent = {**sent, Collective("all_reduce", 4_000_000, tuple(range(tp)), True): 2}
    forward: Work = {Op(int(1e12 / tp), 1000, 2048 // tp): 1, Op(0, int(1e8 / tp)): 3, **sent}
    backward: Work = {Op(int(REPEATED[mode] * 1e12 / tp), 1000, 2048 // tp): 1, **sent}
    if any(True for _ in experts_in(model.foundation)):
        read = Op(0, int(4e9 / tp / (own.ep or 1)))
        forward, backward = {**forward, read: 1}, {**backward, read: 2}
    weights = 4e7 / tp / shards
    block = CountedPart(weights, weights, 2 * weights, KEPT[mode] / tp, forward, backward)
    encoder = encoded().part if ENCODER in model.components else CountedPart()
    sizes = {"weights": weights + encoder.weights / shards, "optimizer": 2 * weights + encoder.optimizer / shards}
    blocks = (block,) * len(text_blocks(model.foundation))
    return Cell(blocks, replace(block, **sizes, kept=1e6 / tp), 1e6, shards)


def encoded(*_: object) -> Encoding:
    """An encoder of 1 TFLOP for 1,000 elements."""
    forward: Work = {Op(10**12, 1000, 1024): 1}
    backward: Work = {Op(2 * 10**12, 1000, 1024): 1}
    part = CountedPart(ENCODER_BYTES, 1e7, 2e7, 1e6, forward, backward)
    return Encoding(part, 1000, 10_000)
