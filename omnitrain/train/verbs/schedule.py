"""``omnitrain show --schedule``: show the pipeline schedule of a recipe, simulated without ranks and weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from rich.table import Column, Table

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import section_text
from omnitrain.parallel.pipeline.stages import PipelineStages, holders, path_of_blocks, stages_of
from omnitrain.parallel.placement import pipeline_shape, place_components
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.parallel.resolve.sections import full_windows
from omnitrain.parallel.state import ParallelState, states_of_components
from omnitrain.plan.placement import Placement, Topology
from omnitrain.plan.schedule.actions import Action, Kind, Schedule, SectionWindows
from omnitrain.plan.schedule.draw import as_json, gantt, graph, grid, row_names
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.simulate import Timeline, simulate
from omnitrain.plan.schedule.table import table_of
from omnitrain.plan.schedule.validate import validate
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, PlanError, Section
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.train.build_from_recipe import build_without_tokenizer
from omnitrain.train.device import mixed_precision
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import quiet_libraries
from omnitrain.train.micro_batches import check_micro_batches, micro_batches_of_rank

_GANTT_MARGIN = 17  # columns for the idle time, besides the name of the row


@dataclass(frozen=True)
class StageRow:
    """A stage of a pipeline."""

    rank: int  # its pipeline rank
    blocks: tuple[int, int]  # its first block, and the block after its last one
    parameters: int  # number of parameters; what several stages hold counts in each
    others: tuple[str, ...]  # modules outside of blocks, and components, that are part of it
    share: float  # its share of the cost of all stages


@dataclass(frozen=True)
class _Times:
    """Seconds of actions by kind and stage, and of encoding a window; ``twice``: encoders that repeat forwards."""

    stages: Mapping[tuple[Kind, int], float]
    encodes: Mapping[str, float]
    twice: frozenset[str]

    def encoding(self, component: str, window: int) -> float:
        """Return the seconds in which a section encodes a window."""
        return self.encodes[component]

    def __call__(self, action: Action) -> float:
        """Return the seconds of an action; messages take none."""
        if action.kind is Kind.ENCODE:
            return self.encodes[action.component]
        if action.kind is Kind.HEAD:
            return 3 * self.encodes[action.component]
        if action.kind is Kind.ENCODE_B:
            return self.encodes[action.component] * (3 if action.component in self.twice else 2)
        return sum(self.stages[part.kind, part.stage] for part in action.passes if part.stage is not None)


@dataclass(frozen=True)
class _Planned:
    """A recipe on its ranks, which need not exist: its model without weights, the ranks of ``main``, complete plans."""

    recipe: Recipe
    model: OmniModel
    state: ParallelState
    plans: Mapping[str, ComponentPlan]
    topology: Topology
    number: int  # micro-batches of a rank in a step
    advice: Sequence[str]  # what would be a better one

    @property
    def sections(self) -> Mapping[str, Section]:
        """Section -> its settings."""
        return self.recipe.parallel.sections

    @property
    def has_pipeline(self) -> bool:
        """Whether the foundation is cut into stages."""
        return self.state.size("pp") > 1

    @property
    def settings(self) -> PipelineSchedule:
        """How a step runs through the stages."""
        return self.plans[FOUNDATION].schedule or PipelineSchedule()

    @property
    def encoded_twice(self) -> frozenset[str]:
        """Encoders of sections that keep no activations."""
        twice = (section.components for section in self.sections.values() if section.encode_twice)
        return frozenset(chain.from_iterable(twice))

    def encodes(self, forward: float, encode: float | None) -> dict[str, float]:
        """Encoder -> the time in which its section encodes the items of a window of all data-parallel ranks."""
        parameters = {name: sum(p.numel() for p in of.values()) for name, of in self.model.components.items()}
        return {
            name: (encode if encode is not None else forward * parameters[name] / parameters[FOUNDATION])
            * (section.micro_batch * self.state.dp_size / section.ranks)
            for section in self.sections.values()
            for name in section.components
        }

    def windows(self, section: str) -> SectionWindows:
        """The windows of a section."""
        full = full_windows(
            self.recipe.parallel, self.plans, section, self.number, self.model.decoder_names, self.topology.at_end
        )
        return _in_two_steps(full, self.recipe.parallel.sections[section], self.number)

    def stages(self) -> list[StageRow]:
        """The stages of the pipeline; none without one."""
        if not self.has_pipeline:
            return []
        stages = stages_of(self.model, self.settings, self.state)
        return _stage_rows(self.model, stages, self.topology.names("exchange"), self.topology.names("message"))

    def main(self, placements: Iterable[Placement] = ()) -> Schedule:
        """The schedule of the ranks that read packs."""
        return table_of(pipeline_shape(self.plans[FOUNDATION]), self.number, placements)


def show_schedule(
    recipe: Recipe,
    num_ranks: int | None = None,
    *,
    forward: float | None = None,
    backward: float | None = None,
    encode: float | None = None,
) -> dict[str, Any]:
    """Print the stages of a recipe's pipeline, the graph of a step, and its simulation; return them for JSON.

    The time of a stage follows from its cost, the number of its active parameters per token. A backward takes twice as
    long as a forward, unless both are given. Messages take no time, and encoders that run on all pipeline ranks are not
    part of the table. Every micro-batch has media for each encoder of a section, whose time follows from its number of
    parameters, as if it encoded as many tokens as the foundation reads.

    ``num_ranks`` None: a number that the plan fits. ``forward`` and ``backward``: seconds of a micro-batch through all
    stages; without them, times are in forwards of an average stage. ``encode``: seconds (or such forwards) in which one
    rank encodes the items of a micro-batch, for each encoder of a section. Raises UserError: the recipe has neither a
    pipeline nor sections, or its plan does not fit the model or the ranks.
    """
    planned = _planned(recipe, num_ranks)
    if encode is not None and not planned.sections:
        raise UserError("--encode: this recipe has no sections (parallel.sections), so no encoder has times of its own")
    main, rows = planned.main(), planned.stages()
    is_in_seconds = forward is not None or backward is not None
    forward = forward or (backward / 2 if backward is not None else float(main.num_stages))
    backward = backward or 2 * forward
    shares = [row.share for row in rows] or [1.0]
    times = _Times(_durations(shares, forward, backward), planned.encodes(forward, encode), planned.encoded_twice)
    windows = [planned.windows(name) for name in planned.sections]
    schedule = with_sections(main, windows, times, times.encoding)
    validate(schedule)
    timeline = simulate(schedule, times)
    equal = simulate(main, _durations([1 / len(shares)] * len(shares), forward, backward))
    _show_plan(planned, schedule, rows)
    whole = planned.main(planned.topology.components)
    console.print("Graph of a step, with the actions of micro-batch 0")
    console.print(
        graph(planned.topology, with_sections(whole, windows, times, times.encoding)), soft_wrap=True, markup=False
    )
    console.print(grid(schedule, width=console.width), soft_wrap=True, markup=False)
    margin = _GANTT_MARGIN + max(len(name) for name in row_names(schedule))
    console.print(gantt(timeline, width=max(20, console.width - margin)), soft_wrap=True, markup=False)
    remarks = _times_in_words(timeline, equal.bubble, is_in_seconds)
    for line in (*remarks, *_remarks(planned, encodes_as_estimated=bool(planned.sections) and encode is None)):
        console.print(line, soft_wrap=True)
    return {
        "kind": planned.settings.resolved_kind if planned.has_pipeline else "accumulate",
        "micro_batches": schedule.num_micro_batches,
        "stages": [asdict(row) for row in rows],
        "placements": planned.topology.facts(),
        "bubble_of_equal_stages": equal.bubble,
        **as_json(timeline),
    }


def _planned(recipe: Recipe, num_ranks: int | None) -> _Planned:
    if recipe.train.samples_per_step is not None:
        raise UserError(
            f"train.samples_per_step: found {recipe.train.samples_per_step}, but `show --schedule` reads no data to "
            "find the packs of a step; use train.samples_per_step=null train.packs_per_step=N (`check` prints N)"
        )
    quiet_libraries()
    model = build_without_tokenizer(recipe)
    try:
        mixed = mixed_precision(recipe.train, "cpu")
        state, plans = resolve_without_ranks(model, recipe.parallel, mixed, num_ranks)
    except PlanError as error:
        raise error.under("parallel") from None
    if state.size("pp") == 1 and not recipe.parallel.sections:
        raise UserError(
            "this recipe has no pipeline (pp is 1) and no section: each rank runs all blocks, and a forward and its "
            "backward in turn (`omnitrain check --nproc N` prints such a layout); for a pipeline, set "
            f"parallel.components.{FOUNDATION}.pp=2"
        )
    topology = place_components(model, plans, states_of_components(state, recipe.parallel, plans))
    advice = check_micro_batches(recipe, state)
    return _Planned(recipe, model, state, plans, topology, micro_batches_of_rank(recipe, state), advice)


def _show_plan(planned: _Planned, schedule: Schedule, rows: list[StageRow]) -> None:
    _show_head(planned.settings, schedule, planned.state)
    for name, section in planned.sections.items():
        _show_section(name, section, planned.state)
    if rows:
        _show_stages(rows)
    facts = planned.topology.facts()
    if len(facts) > 1:
        shown = [key for key in facts[0] if key != "section" or any(row["section"] != "main" for row in facts)]
        table = Table(*(Column(name, overflow="fold") for name in shown), title="Placements", title_justify="left")
        for row in facts:
            table.add_row(*(row[column] for column in shown))
        console.print(table)


def _remarks(planned: _Planned, *, encodes_as_estimated: bool) -> Iterator[str]:
    """Yield what the times leave out, and advice."""
    if encodes_as_estimated:
        yield "encoders take as long as their parameters say, as if they encoded all tokens"
    for name in planned.topology.names("exchange"):
        window = planned.plans[name].encode.window
        several = {"step": "all micro-batches of a step", "auto": "as many micro-batches as are fastest in simulation"}
        of = several.get(str(window), f"{window} micro-batch{'es' * (window != 1)} at a time")
        yield f"{name}: all pipeline ranks encode the items of {of} (not in these times)"
    yield from (f"advice: {line}" for line in planned.advice)


def _in_two_steps(windows: SectionWindows, section: Section, number: int) -> SectionWindows:
    """The windows of a section in this step of so many micro-batches, and in the next."""
    if not section.ahead:
        return windows
    later = {component: [number + start for start in starts] for component, starts in windows.encoded.items()}
    return replace(windows, is_encoded=True, upcoming=later)


def _stage_rows(
    model: OmniModel, stages: PipelineStages, separate: Sequence[str], apart: Collection[str]
) -> list[StageRow]:
    """The stages without the components ``apart``, which sections have."""
    by_stage = replace(stages, ranks=tuple(range(stages.num_stages)))  # as if each stage had a rank of its own
    held = holders(model, by_stage, model.stage_contract.readers, separate)
    parameters = dict(model.named_parameters())
    component_of = {name: component for component, names in model.components.items() for name in names}
    blocks = f"{path_of_blocks(model)}."

    def outside_blocks(name: str) -> str:
        """The component, or the module of the foundation."""
        component = component_of[name]
        return name.removeprefix(f"{FOUNDATION}.").rpartition(".")[0] if component == FOUNDATION else component

    rows = []
    for stage, rank in enumerate(stages.ranks):
        own = [name for name, of_stages in held.items() if stage in of_stages and component_of[name] not in apart]
        others = dict.fromkeys(outside_blocks(name) for name in own if not name.startswith(blocks))
        number = sum(parameters[name].numel() for name in own)
        share = stages.costs[stage] / sum(stages.costs)
        rows.append(StageRow(rank, stages.spans[stage], number, tuple(others), share))
    return rows


def _durations(shares: Sequence[float], forward: float, backward: float) -> Mapping[tuple[Kind, int], float]:
    """Return the time of each kind of action of each stage: its share of the time of all stages."""
    whole = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
    return {(kind, stage): time * share for kind, time in whole.items() for stage, share in enumerate(shares)}


def _show_head(settings: PipelineSchedule, schedule: Schedule, state: ParallelState) -> None:
    chunks = settings.stages_per_rank
    of_data = f", {state.dp_size} times (data-parallel)" if state.dp_size > 1 else ""
    ranks = f"{state.num_ranks} ranks (--nproc {state.num_ranks})"
    number = f"{schedule.num_micro_batches} micro-batch{'es' * (schedule.num_micro_batches > 1)} per rank and step"
    if schedule.num_pipeline_ranks == 1:
        console.print(f"gradient accumulation on {ranks}: 1 rank{of_data} without a pipeline, {number}", soft_wrap=True)
        return
    console.print(
        f"{settings.resolved_kind} on {ranks}: {schedule.num_pipeline_ranks} pipeline ranks{of_data}, {chunks} "
        f"stage{'s' * (chunks > 1)} on each, {number}",
        soft_wrap=True,
    )


def _show_section(name: str, section: Section, state: ParallelState) -> None:
    """Print the encoders of a section, its ranks, and what it keeps."""
    several = f"{section.micro_batch} micro-batch{'es' * (section.micro_batch > 1)} at a time"
    keeps = "all windows" if section.in_flight is None else f"{section.in_flight} of them"
    keeps = "no activations" if section.encode_twice else f"activations of {keeps}"
    console.print(
        f"section {section_text(state.of_section(name))}: {', '.join(section.components)}, {several}, "
        f"{section.slots} slots, {keeps}",
        soft_wrap=True,
    )


def _show_stages(rows: list[StageRow]) -> None:
    columns = [
        Column(name, justify="right", no_wrap=True) for name in ("stage", "rank", "blocks", "parameters", "cost")
    ]
    table = Table(*columns, Column("besides blocks", overflow="fold"), title="Stages", title_justify="left")
    for stage, row in enumerate(rows):
        start, stop = row.blocks
        blocks = str(start) if stop == start + 1 else f"{start} to {stop - 1}"
        values = (str(stage), str(row.rank), blocks, f"{row.parameters:,}", f"{row.share:.1%}")
        table.add_row(*values, ", ".join(row.others))
    console.print(table)


def _times_in_words(timeline: Timeline, bubble_of_equal: float, is_in_seconds: bool) -> tuple[str, ...]:
    unit = "s" if is_in_seconds else "forwards of an average stage (a backward is twice as long)"
    peaks_of_ranks = timeline.schedule.peak_live()[: timeline.schedule.num_pipeline_ranks]
    peaks = ", ".join(f"{peak} on rank {rank}" for rank, peak in enumerate(peaks_of_ranks))
    has_sections = timeline.schedule.num_ranks > timeline.schedule.num_pipeline_ranks
    of = "a pipeline rank or a section, on average" if has_sections else "all ranks"
    equal = f" ({bubble_of_equal:.1%} if stages took equally long)" if timeline.schedule.num_stages > 1 else ""
    return (
        f"makespan: {timeline.makespan:.4g} {unit}",
        f"bubble: {timeline.bubble:.1%} of the time of {of}{equal}",
        f"peak of live activations, in micro-batches of a stage: {peaks}",
    )
