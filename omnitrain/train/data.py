"""The data of a run: training steps of this rank, and the held-out data sets."""

from __future__ import annotations

from omnitrain.data.loader import StepLoader, build_dataloader, require_usable
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.data.slots import LoaderState
from omnitrain.data.unshown import require_shown
from omnitrain.models.omni.lockstep import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Recipe
from omnitrain.train.process_groups import Ranks


def open_data(
    recipe: Recipe, model: OmniModel, processor: OmniProcessor, ranks: Ranks, state: LoaderState
) -> tuple[StepLoader, list[RowSource]]:
    """Open all data sets, and prepare the first row of every kind.

    Args:
        recipe: of the run.
        model: laid out; what it needs decides how samples are packed and steps planned.
        processor: of the model.
        ranks: all of the run; this one's steps come out.
        state: where the run's data stand.

    Raises:
        UserError: a data set that cannot be read, a first row that is of no use to the model, media that no message
            shows, or a component that no training data feed.
    """
    contract = model.runner.contract
    loader = build_dataloader(
        recipe.data,
        processor,
        seed=recipe.train.seed,
        state=state,
        alone=not contract.packs,
        without_tails=contract.without_tails,
        slots=recipe.train.micro_batches,
        rank=ranks.data_rank,
        ranks=ranks.data_size,
        idle=idle_prompt(model),
        then=step_planner(model, ranks.rendezvous),
    )
    heldout = open_sources(recipe.data.heldout)
    require_usable([*loader.sources, *heldout], processor)
    require_shown(loader.sources, heldout, processor, spared(recipe, model))
    return loader, heldout


def spared(recipe: Recipe, model: OmniModel) -> list[str]:
    """Components that the data need not feed: those of a checkpoint, which cannot be left out, if nothing trains them.

    Args:
        recipe: of the run.
        model: frozen as it will train.
    """
    if recipe.model.checkpoint is None:
        return []
    return [name for name, own in model.components.items() if not any(p.requires_grad for p in own.values())]
