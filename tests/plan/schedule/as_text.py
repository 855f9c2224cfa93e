"""Schedules as text, a line for each rank; and schedules whose ranks connect at their first messages."""

from __future__ import annotations

from typing import Any

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import RECEIVES, SENDS, Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import Timeline


def text_of(schedule: Schedule) -> str:
    """A line for each rank, its actions separated by commas."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def read(text: str) -> Schedule:
    """What :func:`text_of` wrote. The stages, their ranks and the micro-batches follow from the forwards."""
    actions = tuple(tuple(Action.parse(cell) for cell in line.split(",") if cell.strip()) for line in text.splitlines())
    forwards = [
        (rank, part)
        for rank, row in enumerate(actions)
        for action in row
        for part in action.passes
        if part.kind is Kind.F
    ]
    ranks = {part.stage: rank for rank, part in reversed(forwards)}
    if missing := [stage for stage in range(max(ranks) + 1) if stage not in ranks]:
        raise ScheduleError(f"no rank of this schedule runs a forward of stage {missing[0]}")
    number = max(part.micro_batch for _, part in forwards) + 1
    return Schedule(actions, tuple(ranks[stage] for stage in range(len(ranks))), number)


Channel = tuple[str, str, int, int]  # F or B, component, sender, receiver


def channels(schedule: Schedule) -> dict[Channel, list[tuple[int, int]]]:
    """Each channel -> the rank and the index of its messages."""
    found: dict[Channel, list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if action.kind in SENDS | RECEIVES:
                ends = (rank, action.peer) if action.kind in SENDS else (action.peer, rank)
                found.setdefault((action.kind[-1], action.component, *ends), []).append((rank, index))
    return found


def unconnected(schedule: Schedule, connected: set[Channel] | frozenset[Channel] = frozenset()) -> Schedule:
    """The schedule with a handshake before the first message of each channel, at both of its ends.

    So NCCL connects two ranks: who comes first waits on the host until the other one comes.
    """
    rows = [[[action] for action in row] for row in schedule.actions]
    for number, (channel, places) in enumerate(channels(schedule).items()):
        ends = dict(reversed(places))
        for rank, index in ends.items() if channel not in connected else ():
            (other,) = set(ends) - {rank}
            here, there = (f"connects{number}to{end}" for end in (rank, other))
            hand = Action(Kind.SEND_B, None, 0, other, there), Action(Kind.RECV_B, None, 0, other, here)
            rows[rank][index] = [*hand, *rows[rank][index]]
    return schedule.with_actions([step for steps in row for step in steps] for row in rows)


def idle_inside(timeline: Timeline, rank: int) -> Any:
    """Seconds between a rank's first and last computation in which it does not compute."""
    computing = timeline.computing(rank)
    return computing[-1].end - computing[0].start - sum(event.end - event.start for event in computing)
