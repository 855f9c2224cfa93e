"""Open the data of a run: the training steps of this rank, and the held-out data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omnitrain.data.loading.loader import StepLoader, build_dataloader, require_usable
from omnitrain.data.loading.slots import LoaderState
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.unread import require_shown, unread_notes
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.models.omni.idle import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.step.item_costs import MeasuredCosts
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.console import console
from omnitrain.train.process_groups import Ranks


def open_data(
    recipe: Recipe,
    model: OmniModel,
    processor: OmniProcessor,
    ranks: Ranks,
    state: LoaderState,
    measured: MeasuredCosts | None = None,
) -> tuple[StepLoader, list[RowSource]]:
    """Open all data sets, and prepare the first row of every kind; return this rank's loader and the held-out data.

    The contract of the sharded ``model`` decides how samples are packed and steps planned; ``state`` is that of the
    run's data, ``measured`` are the costs of items that the run measures. Raises UserError: a data set cannot be read,
    the model cannot use a first row, no message shows some media, or a component gets no training data.
    """
    contract, planner = model.runner.contract, step_planner(model, ranks.rendezvous, measured)
    loader = build_dataloader(
        recipe.data,
        processor,
        seed=recipe.train.seed,
        state=state if ranks.is_first else replace(state, rejected=()),  # one rank lists those from before
        alone=not contract.packs,
        without_tails=contract.without_tails,
        slots=recipe.train.micro_batches,
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
