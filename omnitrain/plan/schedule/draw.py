"""Show the graph of a step, its schedule as a grid, and a simulated step as a Gantt chart in text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omnitrain.plan.placement import Topology
from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import Event, Timeline, simulate

_FILL = {Kind.W: "-", Kind.OVERLAP_F_B: "=", **dict.fromkeys((Kind.F, Kind.ENCODE), ">")}
_FILL |= dict.fromkeys((Kind.B, Kind.I, Kind.ENCODE_B), "<") | {Kind.HEAD: "="}
_IDLE = "."


def grid(schedule: Schedule, *, width: int | None = None) -> str:
    """Return a line for each rank and a column for each step, in which a rank runs at most one forward or backward.

    A section has a line, too, which bears its name. Steps in which a rank waits are empty: the grid is the schedule in
    time, if all actions take equally long. Lines go on below after ``width`` characters.
    """
    timeline = simulate(schedule, lambda action: int(bool(action.passes) or action.component in schedule.slots))
    rows = [
        {event.start: _cell(event.action, schedule) for event in row if event.action.computes}
        for row in timeline.events
    ]
    heads = row_names(schedule)
    cell = max((len(cell) for row in rows for cell in row.values()), default=0)
    columns = timeline.makespan
    if width is not None:
        columns = max(1, (width - len(f"{heads[0]} | ") + 1) // (cell + 1))
    parts = []
    for start in range(0, timeline.makespan, columns):
        steps = range(start, min(start + columns, timeline.makespan))
        lines = (" ".join(row.get(step, "").ljust(cell) for step in steps) for row in rows)
        parts.append("".join(f"{head} | {line}".rstrip() + "\n" for head, line in zip(heads, lines, strict=True)))
    return "\n".join(parts)


def graph(topology: Topology, schedule: Schedule) -> str:
    """Return the nodes and edges of a step as text, with the actions of micro-batch 0.

    A node stands below the one that reads its features, at the end of their edge. ``schedule``: of all components.
    """
    facts = {row["component"]: row for row in topology.facts()}
    roots = [name for name, row in facts.items() if not row["features go to"]]
    return "".join(f"{line}\n" for root in roots for line in _subtree(root, facts, schedule))


def _subtree(name: str, facts: Mapping[str, Mapping[str, str]], schedule: Schedule) -> Iterator[str]:
    """Yield the lines of a node and of those below it."""
    row, below = facts[name], [other for other in facts if facts[other]["features go to"] == name]
    yield f"{name}: rank{'s' * (' ' in row['ranks'])} {row['ranks']} of {row['section']}"
    for of_row, actions in zip(row_names(schedule), schedule.actions, strict=True):
        parts = [part for action in actions for part in action.parts or (action,)]
        own = [str(part).partition("@")[0] for part in parts if part.owner == name and part.micro_batch == 0]
        if own:
            yield f"{'│' if below else ' '}  {' '.join(of_row.split())}: {' '.join(own)}"
    for node in below:
        first, *others = _subtree(node, facts, schedule)
        yield f"{'└' if node == below[-1] else '├'}─ {facts[node]['by']} ─ {first}"
        yield from (f"{' ' if node == below[-1] else '│'}  {line}" for line in others)


def row_names(schedule: Schedule) -> list[str]:
    """Return the names of a schedule's lists of actions, all of one width: pipeline ranks, then sections."""
    names = [f"rank {rank:>2}" for rank in range(schedule.num_pipeline_ranks)]
    for section in schedule.sections:
        names += (
            [section.name] if section.num_stages == 1 else [f"{section.name} {k}" for k in range(section.num_stages)]
        )
    return [name.ljust(max(map(len, names))) for name in names]


def gantt(timeline: Timeline, *, width: int = 100) -> str:
    """Return a simulated step as text: a line of ``width`` columns for each rank and section, and its idle time.

    A forward is filled with ``>``, a backward with ``<`` (also of encoders of sections), weight gradients with ``-``,
    an overlap and the loss of a decoder of a section with ``=``, idle time with dots. A second line has messages,
    gathers and reductions, if they take time.
    """
    lines = []
    for rank, (name, row) in enumerate(zip(row_names(timeline.schedule), timeline.events, strict=True)):
        idle = float(timeline.idle(rank) / timeline.makespan) if timeline.makespan else 0.0
        lines.append(f"{name} |{_bars(timeline.computing(rank), timeline, width)}| idle {idle:.1%}")
        moving = [event for event in row if not event.action.computes and event.end > event.start]
        if moving:
            exposed = float(timeline.exposed(rank) / timeline.makespan)
            lines.append(f"{' ' * len(name)} |{_bars(moving, timeline, width)}| exposed {exposed:.1%}")
    return "\n".join(lines) + "\n"


def as_json(timeline: Timeline) -> dict[str, Any]:
    """Return a simulated step as data for JSON, in seconds; events without duration are left out."""
    schedule = timeline.schedule

    def shown(event: Event) -> dict[str, Any]:
        times = {"start": float(event.start), "end": float(event.end)}
        return {"action": str(event.action), "stream": "compute" if event.action.computes else "communication", **times}

    ranks = [
        {
            "name": name.strip(),
            "idle": float(timeline.idle(rank)),
            "exposed": float(timeline.exposed(rank)),
            "peak_live": peak_live,
            "events": [shown(event) for event in timeline.events[rank] if event.end > event.start],
        }
        for rank, (name, peak_live) in enumerate(zip(row_names(schedule), schedule.peak_live(), strict=True))
    ]
    return {"makespan": float(timeline.makespan), "bubble": timeline.bubble, "ranks": ranks}


def _cell(action: Action, schedule: Schedule) -> str:
    """The name of an action; of a section, without the component, whose order is the same in all windows."""
    name = "|".join(map(str, action.passes)) or str(action)
    return name.partition("@")[0] if action.component in schedule.slots else name


def _bars(events: list[Event], timeline: Timeline, width: int) -> str:
    """Draw each event from its first column to its last, its name first if there is room."""
    line = [_IDLE] * width
    for event in events:
        start, stop = (round(width * float(time / timeline.makespan)) for time in (event.start, event.end))
        name, room = _cell(event.action, timeline.schedule), stop - start
        line[start:stop] = (name if len(name) <= room else "").ljust(room, _FILL.get(event.action.kind, "~"))
    return "".join(line)
