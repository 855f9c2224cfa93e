"""The data of a run: training steps of this rank, and the held-out data sets."""

from __future__ import annotations

from omnitrain.data.loader import StepLoader, build_dataloader, require_usable
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.data.slots import LoaderState
from omnitrain.models.in_step import idle_prompt
from omnitrain.models.omni import OmniModel
from omnitrain.parallel.planning import step_planner
from omnitrain.recipe import Recipe
from omnitrain.train.ranks import Ranks


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
        UserError: a data set that cannot be read, or a first row that is of no use to the model.
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
        then=step_planner(model, ranks.meeting),
    )
    heldout = open_sources(recipe.data.heldout)
    require_usable([*loader.sources, *heldout], processor)
    return loader, heldout
