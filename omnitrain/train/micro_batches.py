"""How many micro-batches a rank has in a step, and whether its pipeline schedule needs more."""

from __future__ import annotations

from omnitrain.data.loading.slots import share_of_rank
from omnitrain.errors import UserError
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule.generators import least_micro_batches
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION, PipelineSchedule


def micro_batches_of_rank(recipe: Recipe, state: ParallelState) -> int:
    """Return the number of micro-batches of a step on each rank.

    Raises:
        UserError: `train.micro_batches` cannot be divided among the data-parallel ranks.
    """
    return len(share_of_rank(0, state.dp_size, recipe.train.micro_batches).slots)


def require_enough_micro_batches(recipe: Recipe, state: ParallelState | None) -> str | None:
    """Check that the steps of a recipe fill its pipeline.

    A schedule that the recipe asks for needs so many micro-batches that its idle time is what its formula says. The
    default schedule runs with fewer.

    Args:
        recipe: the recipe.
        state: the parallel state of its run. None: a single process.

    Returns:
        Advice, if the default schedule has fewer micro-batches than it needs.

    Raises:
        UserError: `train.micro_batches` does not fit the ranks, or a schedule that the recipe asks for needs more.
    """
    if state is None:
        return None
    found, ranks = micro_batches_of_rank(recipe, state), state.size("pp")
    if ranks == 1:
        return None
    settings = recipe.parallel.of(FOUNDATION).schedule or PipelineSchedule()
    kind = settings.resolved_kind
    needed = least_micro_batches(kind, ranks, settings.group_size)
    if found >= needed:
        return None
    of = "in groups of " + str(settings.group_size) if settings.group_size else f"on {ranks} pipeline ranks"
    data = "" if state.dp_size == 1 else f" on {state.dp_size} data-parallel ranks"
    words = (
        f"{kind} {of} needs {needed} micro-batches per rank and step, but train.micro_batches "
        f"{recipe.train.micro_batches} gives {found}{data}; set train.micro_batches to {needed * state.dp_size}"
    )
    if (settings.kind, settings.chunks, settings.group_size) == (None, None, None):
        return f"{words}, because pipeline ranks are idle most of the time with fewer"
    raise UserError(f"parallel.{recipe.parallel.path_of(FOUNDATION, 'schedule')}.schedule: {words} or more")
