"""The activities of ranks in a traced step, and which communication they hide behind computation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from omnitrain.plan.schedule.actions import ENCODES, RECEIVES, SENDS, WEIGHTS, Action, Kind
from omnitrain.report.html import swatch
from omnitrain.report.run_record import RunRecord
from omnitrain.report.svg import Bar, draw_bars

MEANINGS = {
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
_STEPS, _RANKS = 3, 16  # in one page; the table has all ranks of a step
_COLUMNS = 2000  # bars that are closer than this fraction of the width are drawn as one
_LANES = ("actions", "compute", "in transit")
_KINDS = {
    "forward": {Kind.F},
    "exchange": {Kind.EXCHANGE},
    "encode": ENCODES,
    "message": SENDS | RECEIVES,
    "weights": WEIGHTS,
    "optimizer": {Kind.OPTIMIZER},
}
Interval = tuple[float, float]


class TracedSpan(NamedTuple):
    """A span of a trace, in seconds: an activity (of :data:`MEANINGS`) in a lane.

    The lane ``compute`` has what happens inside of ``actions``, and between them.
    """

    lane: str
    activity: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTime:
    """The spans of a rank in a traced step, at least one, by their start. Its name contains its section."""

    rank: int
    name: str
    events: tuple[TracedSpan, ...]

    @cached_property
    def spans(self) -> Mapping[str, list[Interval]]:
        """Activity -> when the rank did it, without overlap."""
        return {name: union((e.start, e.end) for e in self.events if e.activity == name) for name in MEANINGS}

    def spans_in(self, lane: str, activity: str, first: float, gap: float) -> list[Interval]:
        """Return when the rank did an activity of a lane, counted from ``first``; each span is ``gap`` longer."""
        events = (event for event in self.events if event.lane == lane and event.activity == activity)
        return union((event.start - first, event.end - first + gap) for event in events)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Activity -> seconds; also of the ``step``, of ``communication`` and of its parts.

        Communication: an all-to-all or an exchange of features was in transit, or waited for. ``exposed``: the rank
        waited for it and did not compute; ``hidden``: the rest.
        """
        of_each = {name: length(spans) for name, spans in self.spans.items()}
        communication = length(union([*self.spans["all-to-all"], *self.spans["wait"]]))
        parts = {"hidden": communication - of_each["wait"], "exposed": of_each["wait"]}
        step = max(event.end for event in self.events) - self.events[0].start
        return {**of_each, "step": step, "communication": communication, **parts}


def traced_steps(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return title, picture, and columns and rows (in ms) of a table of the first traced steps of runs."""
    return [
        _shown(f"{run.label}: step {number}", ranks)
        for run in runs
        for number, files in list(run.traces.items())[:_STEPS]
        if (ranks := [found for rank, file in files.items() if (found := _read(rank, file)) is not None])
    ]


def legend(steps: Sequence[Mapping[str, Any]]) -> list[tuple[Markup, str]]:
    """Return the activities in these steps, in their colours, and what they mean."""
    used = {name for step in steps for name in step["columns"]}
    return [(swatch(i, name), meaning) for i, (name, meaning) in enumerate(MEANINGS.items()) if name in used]


def _shown(title: str, ranks: Sequence[RankTime]) -> dict[str, Any]:
    drawn = [rank for rank in ranks if rank.rank < _RANKS]
    columns = [name for name in MEANINGS if any(rank.spans[name] for rank in ranks)]
    travels = any(rank.seconds["communication"] for rank in ranks)
    of_step = ["step", *columns, *(["communication", "hidden", "exposed"] if travels else [])]
    return {
        "title": title,
        "picture": _picture(title, drawn),
        "left_out": f"Ranks 0 to {_RANKS - 1} are drawn." if len(drawn) < len(ranks) else "",
        "columns": of_step,
        "rows": [[rank.name, *(1e3 * rank.seconds[name] for name in of_step)] for rank in ranks],
        "travels": travels,
    }


def _picture(title: str, ranks: Sequence[RankTime]) -> Markup:
    """Bars of all lanes in milliseconds, from the first start of any rank; what nobody could tell apart is one bar."""
    first = min(rank.events[0].start for rank in ranks)
    gap = (max(event.end for rank in ranks for event in rank.events) - first) / _COLUMNS
    bars: list[Bar] = []
    names: list[str] = []
    for rank in ranks:
        for lane in (lane for lane in _LANES if lane in {event.lane for event in rank.events}):
            for color, activity in enumerate(MEANINGS):
                spans = rank.spans_in(lane, activity, first, gap)
                bars += [Bar(len(names), 1e3 * start, 1e3 * (end - gap - start), color) for start, end in spans]
            names.append(rank.name if lane == "actions" else lane)
    return draw_bars(bars, names, title, "ms")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches of time without overlap, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(end - start for start, end in intervals)


def _read(rank: int, file: Path) -> RankTime | None:
    try:
        every = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        names = [one["args"]["name"] for one in every if one["name"] == "process_name"]
        events = sorted(map(_event, (one for one in every if one["ph"] == "X")), key=lambda event: event.start)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return RankTime(rank, names[0] if names else f"rank {rank}", tuple(events)) if events else None


def _event(one: Mapping[str, Any]) -> TracedSpan:
    kind, start = one["cat"].split(",")[0], one["ts"] / 1e6
    lane, activity = _place(kind, one["name"])
    return TracedSpan(lane, activity, start, start + one["dur"] / 1e6)


def _place(kind: str, name: str) -> tuple[str, str]:
    if kind == "action":
        return "actions", _activity(Action.parse(name))
    if kind == "link":
        return "in transit", "all-to-all"
    if kind == "wait":
        return "compute", "data" if name == "wait for data" else "wait"
    return "compute", name if name in ("encode", "optimizer") else "experts"


def _activity(action: Action) -> str:
    if action.kind is Kind.RECV_F and action.stage is None:
        return "wait"  # for the features of a section; other receives return at once
    return next((name for name, kinds in _KINDS.items() if action.kind in kinds), "backward")
