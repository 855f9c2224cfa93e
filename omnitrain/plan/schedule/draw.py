"""Show a schedule as a grid of steps, and a simulated step as a Gantt chart in text or as JSON."""

from __future__ import annotations

from typing import Any

from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import Event, Stream, Timeline, simulate

_FILL = {Kind.F: ">", Kind.B: "<", Kind.I: "<", Kind.W: "-", Kind.OVERLAP_F_B: "="}
_IDLE = "."


def grid(schedule: Schedule, *, width: int | None = None) -> str:
    """Return a line for each rank and a column for each step, in which a rank runs at most one forward or backward.

    Steps in which a rank waits are empty: the grid is the schedule in time, if all actions take equally long. Lines go
    on below after ``width`` characters.
    """
    timeline = simulate(schedule, lambda action: int(bool(action.passes)))
    rows = [
        {event.start: _cell(event.action) for event in row if event.stream is Stream.COMPUTE} for row in timeline.events
    ]
    cell = max((len(cell) for row in rows for cell in row.values()), default=0)
    columns = timeline.makespan
    if width is not None:
        columns = max(1, (width - len(_row_head(0)) + 1) // (cell + 1))
    parts = (range(start, min(start + columns, timeline.makespan)) for start in range(0, timeline.makespan, columns))
    return "\n".join(_grid_part(rows, part, cell) for part in parts)


def _grid_part(rows: list[dict[Any, str]], steps: range, cell: int) -> str:
    lines = (" ".join(row.get(step, "").ljust(cell) for step in steps).rstrip() for row in rows)
    return "".join(f"{_row_head(rank)}{line}".rstrip() + "\n" for rank, line in enumerate(lines))


def _row_head(rank: int) -> str:
    return f"rank {rank:>2} | "


def gantt(timeline: Timeline, *, width: int = 100) -> str:
    """Return a simulated step as text: for each rank a line of ``width`` columns, and its share of idle time.

    A forward is filled with ``>``, a backward with ``<``, weight gradients with ``-``, an overlap with ``=``, idle time
    with dots. A second line has messages, gathers and reductions, if they take time.
    """
    lines = []
    for rank, row in enumerate(timeline.events):
        computing = [event for event in row if event.stream is Stream.COMPUTE]
        idle = float(timeline.idle(rank) / timeline.makespan) if timeline.makespan else 0.0
        lines.append(f"rank {rank:>2} |{_bars(computing, timeline, width)}| idle {idle:.1%}")
        moving = [event for event in row if event.stream is Stream.COMMUNICATION and event.end > event.start]
        if moving:
            exposed = float(timeline.exposed(rank) / timeline.makespan)
            lines.append(f"        |{_bars(moving, timeline, width)}| exposed {exposed:.1%}")
    return "\n".join(lines) + "\n"


def as_json(timeline: Timeline) -> dict[str, Any]:
    """Return a simulated step as data for JSON; times in seconds.

    ``makespan``, ``bubble``, and for each rank ``idle``, ``exposed``, ``peak_live`` and its ``events`` with ``action``,
    ``stream``, ``start`` and ``end``; events without duration are left out.
    """
    return {
        "makespan": float(timeline.makespan),
        "bubble": timeline.bubble,
        "ranks": [
            {
                "idle": float(timeline.idle(rank)),
                "exposed": float(timeline.exposed(rank)),
                "peak_live": peak_live,
                "events": [
                    {
                        "action": str(event.action),
                        "stream": event.stream.value,
                        "start": float(event.start),
                        "end": float(event.end),
                    }
                    for event in timeline.events[rank]
                    if event.end > event.start
                ],
            }
            for rank, peak_live in enumerate(timeline.schedule.peak_live())
        ],
    }


def _cell(action: Action) -> str:
    return "|".join(map(str, action.passes)) or str(action)


def _bars(events: list[Event], timeline: Timeline, width: int) -> str:
    """Draw each event from the column of its start to that of its end, its name first if there is room."""
    line = [_IDLE] * width
    for event in events:
        start, stop = (round(width * float(time / timeline.makespan)) for time in (event.start, event.end))
        name, room = _cell(event.action), stop - start
        line[start:stop] = (name if len(name) <= room else "").ljust(room, _FILL.get(event.action.kind, "~"))
    return "".join(line)
