"""How many micro-batches a rank has in a step, and whether the ranks and their pipeline are busy with them."""

from __future__ import annotations

from omnitrain.data.loading.slots import share_of_rank
from omnitrain.errors import UserError
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule.generators import least_micro_batches
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.plan_groups import PipelineSchedule


def micro_batches_of_rank(recipe: Recipe, state: ParallelState) -> int:
    """Return the number of micro-batches of a step on each rank; the last one is idle on some if they do not fit."""
    return len(share_of_rank(0, state.dp_size, recipe.train.packs_per_step).slots)


def check_micro_batches(recipe: Recipe, state: ParallelState | None) -> list[str]:
    """Check that the steps of a recipe fill its ranks and its pipeline; ``state`` is None in a single process.

    Any number of micro-batches runs on any number of data-parallel ranks. A schedule that the recipe asks for needs so
    many micro-batches that its idle time is what its formula says. The default schedule runs with fewer. Returns
    advice, if ranks wait for others in each step, or the default schedule has fewer micro-batches than it needs. Raises
    UserError: a schedule that the recipe asks for needs more micro-batches.
    """
    if state is None:
        return []
    advice = (_uneven_ranks(recipe.train.packs_per_step, state.dp_size), _short_pipeline(recipe, state))
    return [line for line in advice if line is not None]


def _uneven_ranks(slots: int, ranks: int) -> str | None:
    """Advice for ranks that do not all get the same share of the ``slots`` packs of a step."""
    if slots % ranks == 0 or ranks % slots == 0:
        return None
    if slots > ranks:
        fewer, last = slots // ranks * ranks, -(-slots // ranks)
        waits = f"micro-batch {last} of {last} of a step is on {slots % ranks} of them only, and the others wait"
    else:
        fewer, sharing = max(number for number in range(1, slots) if ranks % number == 0), ranks // slots
        waits = f"{sharing} or {sharing + 1} of them divide a pack, and the latter wait"
    fits = f"{fewer} or {slots + -slots % ranks} would fit"
    return f"train.packs_per_step {slots} on {ranks} data-parallel ranks: {waits}; {fits}"


def _short_pipeline(recipe: Recipe, state: ParallelState) -> str | None:
    """Advice for a default schedule with too few micro-batches; raise a UserError for another schedule."""
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
        f"{kind} {of} needs {needed} micro-batches per rank and step, but train.packs_per_step "
        f"{recipe.train.packs_per_step} gives {found}{data}; set train.packs_per_step to {needed * state.dp_size}"
    )
    if (settings.kind, settings.chunks, settings.group_size) == (None, None, None):
        return f"{words}, because pipeline ranks are idle most of the time with fewer"
    raise UserError(f"parallel.{recipe.parallel.path_of(FOUNDATION, 'schedule')}.schedule: {words} or more")
