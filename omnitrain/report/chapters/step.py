"""The chapter of traced steps: what each rank did, and which communication was hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omnitrain.report.chapters.plots import Plots
from omnitrain.report.figures import Bar, draw_bars
from omnitrain.report.html import Cell, Raw, chapter, figure, heading, note, swatch, table, text_of
from omnitrain.report.run_record import RunRecord
from omnitrain.report.timeline import ACTIVITIES, RankTime, lanes_of, read_step, union

_STEPS, _RANKS = 3, 16  # in one page; the table has all ranks of a step
_COLUMNS = 2000  # bars that are closer than this fraction of the width are drawn as one
_MEANING = {
    "forward": "forward of a micro-batch; in a pipeline with its wait for the stage before",
    "backward": "backward of a micro-batch",
    "encode": "a component encodes media",
    "exchange": "features go to the ranks that need them",
    "experts": "products of experts",
    "all-to-all": "tokens on their way to experts, or back",
    "wait": "the rank waits for an exchange, and does not compute",
    "message": "sends and receives between stages, or sections, are started",
    "weights": "weights are gathered or freed, gradients are reduced",
    "optimizer": "gradient norm and update",
    "data": "the rank waits for its packs",
}


def step(runs: Sequence[RunRecord], plots: Plots) -> str:
    """Return the pictures and tables of the first traced steps."""
    parts = []
    for run in runs:
        for number in list(run.traces)[:_STEPS]:
            parts += _step(run, number, run.traces[number], plots)
    if not parts:
        parts = [note("No step was traced. With train.trace.steps=[20] a run traces step 20.")]
    return chapter("step", "Traced steps", parts)


def _step(run: RunRecord, number: int, files: Mapping[int, Path], plots: Plots) -> list[str]:
    ranks = read_step(files)
    if not ranks:
        return []
    title = f"{run.label}: step {number}"
    shown = [rank for rank in ranks if rank.rank < _RANKS]
    lanes = lanes_of(shown)
    svg = draw_bars(_bars(lanes), [_lane(rank, lane) for rank, lane in lanes], plots.name(), title)
    used = [activity for activity in ACTIVITIES if any(rank.seconds[activity] for rank in ranks)]
    return [
        heading(title),
        figure(svg, "What each rank did", is_wide=True),
        note(f"Ranks 0 to {_RANKS - 1} are drawn.") if len(shown) < len(ranks) else "",
        table(("", "meaning"), [[Raw(swatch(ACTIVITIES.index(name)) + text_of(name)), _MEANING[name]] for name in used]),
        heading("Milliseconds by rank"),
        table(
            ("rank", "step", *used, "communication", "hidden", "exposed"),
            [_row(rank, used) for rank in ranks],
        ),
        note(
            "Communication: time in which all-to-alls or exchanges of features were on their way, or waited for. "
            "Exposed: the part for which the rank waited; hidden: the rest. What a rank does in its waits is not "
            "taken off from forward and backward. Activities may overlap."
        ),
    ]


def _row(rank: RankTime, used: Sequence[str]) -> list[Cell]:
    seconds = rank.seconds
    times = [rank.end - rank.start, *(seconds[name] for name in used), rank.in_transit, rank.hidden, rank.exposed]
    return [rank.name, *(1e3 * time for time in times)]


def _lane(rank: RankTime, lane: str) -> str:
    return rank.name if lane == "actions" else lane


def _bars(lanes: Sequence[tuple[RankTime, str]]) -> list[Bar]:
    """Bars of all lanes, from the first start of any rank; what nobody could tell apart is one bar."""
    first, last = min(rank.start for rank, _ in lanes), max(rank.end for rank, _ in lanes)
    gap = (last - first) / _COLUMNS
    bars = []
    for index, (rank, lane) in enumerate(lanes):
        for color, activity in enumerate(ACTIVITIES):
            events = [e for e in rank.events if e.lane == lane and e.activity == activity]
            joined = union((event.start - first, event.end - first + gap) for event in events)
            bars += [Bar(index, start, end - gap - start, color) for start, end in joined]
    return bars
