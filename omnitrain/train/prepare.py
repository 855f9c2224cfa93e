"""Prepare the model of a run: build it, choose its operations, compile it and shard it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from omnitrain.data.loading.loader import StepLoader, build_dataloader, require_usable
from omnitrain.data.loading.slots import LoaderState
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.unread import require_shown, unread_notes
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.models.hf.stored_tensor import weights_left_in_files
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.flops import ModelFlops
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import CompiledBlocks, compile_blocks, compiler_missing
from omnitrain.ops.fused.install import FusedOp
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.step.item_costs import MeasuredCosts
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION, PlanError
from omnitrain.recipe.tree import require_heads
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
    with weights_shown(console):
        layout = _lay_out(model, recipe, ranks, device, mixed)
    compiled = None if layout is None else layout.components[FOUNDATION].compiled
    if compiled is None and is_compiled(recipe, device):  # when it is known which blocks are recomputed
        compiled = compile_blocks(model.foundation, device, max_recompiles=recipe.train.compile.max_recompiles)
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
                checkpoint, frozen, init_device, None, dtype, teachers=teachers, checked=False, plan=recipe.parallel
            )
    model.config.condition_dropout |= recipe.data.condition_dropout.whole > 0
    require_heads(recipe, model.decoders)
    require_effect(recipe, model, processor)  # also checks the contract
    return model.train(), processor


def is_compiled(recipe: Recipe, device: torch.device) -> bool:
    """Whether ``train.compile`` compiles blocks on this device."""
    enabled, plan = recipe.train.compile.enabled, recipe.parallel.of(FOUNDATION)
    if enabled != "auto":
        return enabled
    is_offloaded = plan.memory.offloads("activations") and not plan.memory.recomputes_blocks
    is_split = plan.schedule is not None and plan.schedule.kind == "zbv"  # weights have an action of their own
    is_asked = device.type == "cuda" and not (is_offloaded or is_split)
    return is_asked and plan.compile is None and compiler_missing(device) is None


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


def open_data(
    recipe: Recipe,
    model: OmniModel,
    processor: OmniProcessor,
    ranks: Ranks,
    state: LoaderState,
    measured: MeasuredCosts | None = None,
) -> tuple[StepLoader, list[RowSource]]:
    """Open all data sets, and prepare the first row of every kind; return this rank's loader and the held-out data.

    The contract of the sharded ``model`` decides how samples are packed and steps planned. Raises UserError: a data set
    cannot be read, the model cannot use a first row, no message shows some media, or a component gets no training data.
    """
    contract, planner = model.runner.contract, step_planner(model, ranks.rendezvous, measured)
    loader = build_dataloader(
        recipe.data,
        processor,
        seed=recipe.train.seed,
        state=state if ranks.is_first else replace(state, rejected=()),  # one rank lists those from before
        alone=not contract.packs,
        without_tails=contract.without_tails,
        slots=recipe.train.packs_per_step,
        rank=ranks.data_rank,
        ranks=ranks.data_size,
        idle=idle_prompt(model),
        then=planner,
        peers=ranks.peers,
        media_names=model.media_of_data,
        swap=planner.peers.swap,
    )
    heldout = open_sources(recipe.data.heldout)
    ranks.first(lambda: require_usable([*loader.sources, *heldout], processor))
    require_shown(loader.sources, heldout, processor, spared(recipe, model))
    ranks.first(lambda: show_unread(recipe, [*loader.sources, *heldout], processor))
    return loader, heldout


def show_unread(recipe: Recipe, sources: Sequence[RowSource], processor: OmniProcessor) -> None:
    """Print which keys of the data nothing reads."""
    for line in unread_notes(sources, processor.renderer, recipe):
        console.print(f"note: {line}", soft_wrap=True, markup=False)


def spared(recipe: Recipe, model: OmniModel) -> list[str]:
    """Return the components that need no data: frozen components of a checkpoint, which the recipe cannot remove."""
    if recipe.model.checkpoint is None:
        return []
    parameters_by_name = model.components.items()
    return [name for name, parameters in parameters_by_name if not any(p.requires_grad for p in parameters.values())]
