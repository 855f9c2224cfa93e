"""Prepare the model of a run: build it, choose its operations, compile it and shard it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from omnitrain.data.render.processor import OmniProcessor
from omnitrain.models.hf.stored_tensor import weights_left_in_files
from omnitrain.models.omni.flops import ModelFlops
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import CompiledBlocks, compile_blocks
from omnitrain.ops.fused.install import FusedOp
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION, PlanError
from omnitrain.recipe.save import require_heads
from omnitrain.train.build_from_recipe import build_from_recipe, load_checkpoint, use_ops, use_own_functions
from omnitrain.train.device import compute_dtype, mixed_precision
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.flops import counts_flops
from omnitrain.train.metrics.progress import weights_shown
from omnitrain.train.process_groups import Ranks
from omnitrain.train.useless_keys import require_effect


@dataclass(frozen=True)
class PreparedModel:
    """The model of a run on its device, ready to train."""

    model: OmniModel
    processor: OmniProcessor
    ops: Mapping[str, Mapping[str, FusedOp]]  # component name -> the backends of its operations
    layout: ModelLayout | None  # how the model is sharded. None: one process without a plan
    compiled: CompiledBlocks | None  # the compiled blocks. None: no block is compiled
    flops: ModelFlops | None = None  # counts FLOPs of the model. None: the recipe does not ask for it


def prepare_model(recipe: Recipe, ranks: Ranks, device: torch.device, checkpoint: Path | None) -> PreparedModel:
    """Build the model of ``recipe``, ready to train, from a verified checkpoint if there is one, on every rank."""
    model, processor = ranks.rank_by_rank(lambda: _build(recipe, checkpoint, ranks))
    flops = ModelFlops(model) if counts_flops(recipe.train.flops, device) else None
    mixed = mixed_precision(recipe.train, device.type)
    ops = use_ops(model, recipe.model.ops, device, compute_dtype(recipe.parallel, mixed))
    use_own_functions(model, recipe.train)
    settings, compiled = recipe.train.compile, None
    if settings.enabled:
        compiled = compile_blocks(model.foundation, device, max_recompiles=settings.max_recompiles)
    with weights_shown(console):
        layout = _lay_out(model, recipe, ranks, device, mixed)
    if compiled is None and layout is not None:
        compiled = layout.components[FOUNDATION].compiled
    return PreparedModel(model, processor, ops, layout, compiled, flops)


def _build(recipe: Recipe, checkpoint: Path | None, ranks: Ranks) -> tuple[OmniModel, OmniProcessor]:
    """Build the model. With several ranks, each reads its weights from the files when the model is sharded."""
    # The first rank of a section knows how weights are made of files, and has those that are in no file.
    init_device = "cpu" if ranks.holds_source else "meta"
    with weights_left_in_files() if ranks.peers.size > 1 else nullcontext():
        if checkpoint is None:
            model, processor = build_from_recipe(recipe, init_device)
        else:
            dtype = torch.float32  # as at the start of the run; the plan converts it
            frozen, teachers = recipe.model.freeze, recipe.model.teachers
            model, processor = load_checkpoint(
                checkpoint, frozen, init_device, None, dtype, teachers=teachers, checked=False
            )
    model.config.condition_dropout |= recipe.data.condition_dropout.whole > 0
    require_heads(recipe, model.decoders)
    require_effect(recipe, model, processor)  # also checks the contract
    return model.train(), processor


def _lay_out(
    model: OmniModel, recipe: Recipe, ranks: Ranks, device: torch.device, mixed: bool | None
) -> ModelLayout | None:
    """Shard the model as the plan says; a single process without a parallel state only moves it to its device."""
    if ranks.state is None:
        model.to(device)
        return None
    try:
        build_parallelize_model(
            model, parallel_state=ranks.state, parallel_plan=recipe.parallel, enable_mixed_precision=mixed
        )
    except PlanError as error:
        raise error.under("parallel") from None
    return layout_of(model)
