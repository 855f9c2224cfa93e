"""The model of a run, ready to train: built, with its operations chosen, laid out, perhaps compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from omnitrain.data.processor import OmniProcessor
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import CompiledBlocks, compile_blocks
from omnitrain.ops.fused.install import FusedOp
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION, PlanError
from omnitrain.recipe.save import require_heads
from omnitrain.train.build_from_recipe import build_from_recipe, load_checkpoint, use_ops
from omnitrain.train.effect import require_effect
from omnitrain.train.precision import compute_dtype, mixed_precision
from omnitrain.train.process_groups import Ranks


@dataclass(frozen=True)
class PreparedModel:
    """What a run trains.

    Attributes:
        model: in place, in training mode.
        processor: rows -> samples.
        ops: component name -> the backends of its operations.
        layout: how the model lies on the ranks; None: one process without a plan.
        compiled: the blocks that are compiled; None: none.
    """

    model: OmniModel
    processor: OmniProcessor
    ops: Mapping[str, Mapping[str, FusedOp]]
    layout: ModelLayout | None
    compiled: CompiledBlocks | None


def prepare_model(recipe: Recipe, ranks: Ranks, device: torch.device, checkpoint: Path | None) -> PreparedModel:
    """Build what ``recipe`` trains. Every rank calls it.

    Args:
        recipe: of the run.
        ranks: all of it.
        device: of this rank.
        checkpoint: of the run, to continue from, compared with its checksums; None: it begins.

    Raises:
        UserError: whatever does not fit together in recipe and weights.
    """
    # The others get their part of the weights from the first rank when they lay the model out.
    model, processor = ranks.rank_by_rank(lambda: _build(recipe, checkpoint, "cpu" if ranks.is_first else "meta"))
    mixed = mixed_precision(recipe.train, device.type)
    ops = use_ops(model, recipe.model.ops, device, compute_dtype(recipe.parallel, mixed))
    compiled = _compiled(model, recipe, device)
    layout = _lay_out(model, recipe, ranks, device, mixed)
    if compiled is None and layout is not None:
        compiled = layout.components[FOUNDATION].compiled
    return PreparedModel(model, processor, ops, layout, compiled)


def _build(recipe: Recipe, checkpoint: Path | None, init_device: str) -> tuple[OmniModel, OmniProcessor]:
    if checkpoint is None:
        model, processor = build_from_recipe(recipe, init_device)
    else:
        dtype = torch.float32  # as where it begins; the plan says what becomes of it
        model, processor = load_checkpoint(checkpoint, recipe.model.freeze, init_device, None, dtype, checked=False)
    require_heads(recipe, model.decoders)
    require_effect(recipe, model, processor)  # checks the contract, too
    return model.train(), processor


def _compiled(model: OmniModel, recipe: Recipe, device: torch.device) -> CompiledBlocks | None:
    settings = recipe.train.compile
    if not settings.enabled:
        return None
    return compile_blocks(model.foundation, device, max_recompiles=settings.max_recompiles)


def _lay_out(
    model: OmniModel, recipe: Recipe, ranks: Ranks, device: torch.device, mixed: bool | None
) -> ModelLayout | None:
    """Put the model on the ranks as the plan says; a process alone without a state just has it on its device."""
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
