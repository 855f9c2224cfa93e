"""The chapter of traced steps: what each rank did, and which communication was hidden."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.page.html import Cell, Raw, chapter, figure, heading, note, swatch, table, text_of
from omnitrain.report.chapters.plots import Plots
from omnitrain.report.figures import Bar, draw_bars
from omnitrain.report.run_record import RunRecord
from omnitrain.report.timeline import ACTIVITIES, RankTime, lanes_of, read_step, union

_STEPS, _RANKS = 3, 16  # in one page; the table has all ranks of a step
_COLUMNS = 2000  # bars that are closer than this fraction of the width are drawn as one
_COMMUNICATION = (
    "Communication: time in which all-to-alls or exchanges of features were on their way, or waited for. Exposed: the "
    "part for which the rank waited; hidden: the rest. Waits are part of the forwards and backwards around them."
)
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
    traced = [
        (f"{run.label}: step {number}", ranks)
        for run in runs
        for number, files in list(run.traces.items())[:_STEPS]
        if (ranks := read_step(files))
    ]
    if not traced:
        words = "No step was traced. With train.trace.steps=[20] a run traces step 20."
        return chapter("step", "Traced steps", [note(words)])
    used = [name for name in ACTIVITIES if any(rank.seconds[name] for _, ranks in traced for rank in ranks)]
    legend = [(Raw(swatch(ACTIVITIES.index(name)) + text_of(name)), _MEANING[name]) for name in used]
    drawn = [part for title, ranks in traced for part in _step(title, ranks, plots)]
    return chapter("step", "Traced steps", [table(("", "meaning"), legend), *drawn])


def _step(title: str, ranks: Sequence[RankTime], plots: Plots) -> list[str]:
    shown = [rank for rank in ranks if rank.rank < _RANKS]
    lanes = lanes_of(shown)
    svg = draw_bars(_bars(lanes), [_lane(rank, lane) for rank, lane in lanes], plots.name(), title, "ms")
    used = [activity for activity in ACTIVITIES if any(rank.seconds[activity] for rank in ranks)]
    travels = any(rank.in_transit for rank in ranks)
    communication = ("communication", "hidden", "exposed") if travels else ()
    return [
        heading(title),
        figure(svg, "What each rank did", is_wide=True),
        note(f"Ranks 0 to {_RANKS - 1} are drawn.") if len(shown) < len(ranks) else "",
        table(("milliseconds", "step", *used, *communication), [_row(rank, used, travels) for rank in ranks]),
        note(_COMMUNICATION if travels else "No all-to-all and no exchange of features was on its way."),
    ]


def _row(rank: RankTime, used: Sequence[str], travels: bool) -> list[Cell]:
    seconds = rank.seconds
    times = [rank.end - rank.start, *(seconds[name] for name in used)]
    times += [rank.in_transit, rank.hidden, rank.exposed] if travels else []
    return [rank.name, *(1e3 * time for time in times)]


def _lane(rank: RankTime, lane: str) -> str:
    return rank.name if lane == "actions" else lane


def _bars(lanes: Sequence[tuple[RankTime, str]]) -> list[Bar]:
    """Bars of all lanes in milliseconds, from the first start of any rank; what nobody could tell apart is one bar."""
    first, last = min(rank.start for rank, _ in lanes), max(rank.end for rank, _ in lanes)
    gap = (last - first) / _COLUMNS
    bars = []
    for index, (rank, lane) in enumerate(lanes):
        for color, activity in enumerate(ACTIVITIES):
            events = [e for e in rank.events if e.lane == lane and e.activity == activity]
            joined = union((event.start - first, event.end - first + gap) for event in events)
            bars += [Bar(index, 1e3 * start, 1e3 * (end - gap - start), color) for start, end in joined]
    return bars
