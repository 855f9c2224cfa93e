"""``omnitrain schedule``: show the pipeline schedule of a recipe, simulated without ranks and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import is_separate
from omnitrain.parallel.pipeline.apply import complete_schedule
from omnitrain.parallel.pipeline.stages import PipelineStages, holders, path_of_blocks, stages_of
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule import Kind, Schedule, Timeline, as_json, gantt, grid, simulate
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION, PipelineSchedule, PlanError
from omnitrain.train.build_from_recipe import build_without_tokenizer
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import quiet_libraries
from omnitrain.train.micro_batches import micro_batches_of_rank, require_enough_micro_batches
from omnitrain.train.precision import mixed_precision

_GANTT_MARGIN = 24  # columns for the rank and its idle time


@dataclass(frozen=True)
class StageRow:
    """A stage of a pipeline.

    Attributes:
        rank: its pipeline rank.
        blocks: its first block, and the block after its last one.
        parameters: number of parameters; what several stages hold counts in each.
        others: modules outside of blocks, and components, that are part of it.
        share: its share of the cost of all stages.
    """

    rank: int
    blocks: tuple[int, int]
    parameters: int
    others: tuple[str, ...]
    share: float


def show_schedule(
    recipe: Recipe, num_ranks: int | None = None, *, forward: float | None = None, backward: float | None = None
) -> dict[str, Any]:
    """Print the stages of a recipe's pipeline and its simulated step.

    The time of a stage follows from its cost, the number of parameters that a token meets in it. A backward takes twice
    as long as a forward, unless both are given. Messages take no time, and encoders that run on all pipeline ranks are
    not part of the table.

    Args:
        recipe: the recipe; neither its data nor its tokenizer is read.
        num_ranks: number of ranks of the run. None: a number that the plan fits.
        forward: seconds of the forward of one micro-batch through all stages. None: times are in forwards of an average
            stage, or follow from ``backward``.
        backward: seconds of its backward. None: twice as long as the forward.

    Returns:
        The stages and the simulated step for JSON.

    Raises:
        UserError: the recipe has no pipeline, or its plan does not fit the model or the ranks.
    """
    quiet_libraries()
    model = build_without_tokenizer(recipe)
    try:
        mixed = mixed_precision(recipe.train, "cpu")
        state, plans = resolve_without_ranks(model, recipe.parallel, mixed, num_ranks)
    except PlanError as error:
        raise error.under("parallel") from None
    if state.size("pp") == 1:
        raise UserError(
            "this recipe has no pipeline (pp is 1): each rank runs all blocks, and a forward and its backward in turn; "
            f"set parallel.components.{FOUNDATION}.pp=2"
        )
    settings = plans[FOUNDATION].schedule or PipelineSchedule()
    advice = require_enough_micro_batches(recipe, state)
    stages = stages_of(model, settings, state)
    number, separate = micro_batches_of_rank(recipe, state), [n for n, plan in plans.items() if is_separate(plan)]
    schedule = complete_schedule(settings, state.size("pp"), number)
    rows = _stage_rows(model, stages, separate)
    is_in_seconds = forward is not None or backward is not None
    forward = forward or (backward / 2 if backward is not None else float(stages.num_stages))
    backward = backward or 2 * forward
    shares = [row.share for row in rows]
    timeline = simulate(schedule, _durations(shares, forward, backward))
    equal = simulate(schedule, _durations([1 / len(rows)] * len(rows), forward, backward))
    _show_head(settings, schedule, state)
    _show_stages(rows)
    console.print(grid(schedule, width=console.width), soft_wrap=True, markup=False)
    console.print(gantt(timeline, width=max(20, console.width - _GANTT_MARGIN)), soft_wrap=True, markup=False)
    _show_times(timeline, equal.bubble, is_in_seconds)
    for name in separate:
        window = plans[name].window
        several = {"step": "all micro-batches of a step", "auto": "as many micro-batches as are fastest in simulation"}
        of = several.get(str(window), f"{window} micro-batch{'es' * (window != 1)} at a time")
        console.print(f"{name}: all pipeline ranks encode the items of {of} (not in these times)", soft_wrap=True)
    if advice is not None:
        console.print(f"advice: {advice}", soft_wrap=True)
    return {
        "kind": settings.resolved_kind,
        "micro_batches": schedule.num_micro_batches,
        "stages": [asdict(row) for row in rows],
        "bubble_of_equal_stages": equal.bubble,
        **as_json(timeline),
    }


def _stage_rows(model: OmniModel, stages: PipelineStages, separate: Sequence[str]) -> list[StageRow]:
    by_stage = replace(stages, ranks=tuple(range(stages.num_stages)))  # as if each stage had a rank of its own
    held = holders(model, by_stage, model.stage_contract.readers, separate)
    parameters, component_of = (
        dict(model.named_parameters()),
        {n: c for c, names in model.components.items() for n in names},
    )
    blocks = f"{path_of_blocks(model)}."

    def outside_blocks(name: str) -> str:
        """The component, or the module of the foundation."""
        component = component_of[name]
        return name.removeprefix(f"{FOUNDATION}.").rpartition(".")[0] if component == FOUNDATION else component

    rows = []
    for stage, rank in enumerate(stages.ranks):
        own = [name for name, of_stages in held.items() if stage in of_stages]
        others = dict.fromkeys(outside_blocks(name) for name in own if not name.startswith(blocks))
        number = sum(parameters[name].numel() for name in own)
        share = stages.costs[stage] / sum(stages.costs)
        rows.append(StageRow(rank, stages.spans[stage], number, tuple(others), share))
    return rows


def _durations(shares: Sequence[float], forward: float, backward: float) -> Mapping[tuple[Kind, int], float]:
    """Return the time of each kind of action of each stage: its share of that of all stages."""
    whole = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
    return {(kind, stage): time * share for kind, time in whole.items() for stage, share in enumerate(shares)}


def _show_head(settings: PipelineSchedule, schedule: Schedule, state: ParallelState) -> None:
    chunks = settings.stages_per_rank
    of_data = f", {state.dp_size} times (data-parallel)" if state.dp_size > 1 else ""
    console.print(
        f"{settings.resolved_kind} on {state.world_size} ranks (--nproc {state.world_size}): {schedule.num_ranks} "
        f"pipeline ranks{of_data}, {chunks} stage{'s' * (chunks > 1)} on each, {schedule.num_micro_batches} "
        f"micro-batch{'es' * (schedule.num_micro_batches > 1)} per rank and step",
        soft_wrap=True,
    )


def _show_stages(rows: list[StageRow]) -> None:
    table = Table(title="Stages", title_justify="left")
    for column in ("stage", "rank", "blocks", "parameters", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("besides blocks", overflow="fold")
    for stage, row in enumerate(rows):
        start, stop = row.blocks
        blocks = str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        values = (str(stage), str(row.rank), blocks, f"{row.parameters:,}", f"{row.share:.1%}")
        table.add_row(*values, ", ".join(row.others))
    console.print(table)


def _show_times(timeline: Timeline, bubble_of_equal: float, is_in_seconds: bool) -> None:
    unit = "s" if is_in_seconds else "forwards of an average stage (a backward is twice as long)"
    peaks = ", ".join(f"{peak} on rank {rank}" for rank, peak in enumerate(timeline.schedule.peak_live()))
    for line in (
        f"makespan: {timeline.makespan:.4g} {unit}",
        f"bubble: {timeline.bubble:.1%} of the time of all ranks ({bubble_of_equal:.1%} if stages took equally long)",
        f"peak of live activations, in micro-batches of a stage: {peaks}",
    ):
        console.print(line, soft_wrap=True)
