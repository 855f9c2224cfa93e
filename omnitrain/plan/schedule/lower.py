"""Add to a schedule of forwards and backwards the messages between stages, and FSDP's gathers and reductions."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, islice

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import RECEIVE_FOR, Action, Kind, Schedule
from omnitrain.plan.schedule.encoders import with_weights
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.plan.schedule.validate import validate

_Added = dict[int, list[Action]]  # index of an action -> what comes before or after it


def lower(
    schedule: Schedule, *, receives_ahead: int = 2, hold_weights: bool = True, max_gathered: int | None = None
) -> Schedule:
    """Return the schedule of forwards and backwards with all actions that a rank needs to run it, or raise.

    ``SEND_F`` and ``SEND_B`` are directly after the forward or backward whose result they send to another rank.
    ``RECV_F`` and ``RECV_B``, which only post the receive, are ``receives_ahead`` forwards and backwards ahead of the
    one that needs them, in the order of the sends; earlier where a send that waits for its receive (NCCL) would stop
    the schedule. With ``hold_weights``, ``UNSHARD`` is before the first action of a stage, ``REDUCE`` after its last
    backward, ``RESHARD`` after its last action; else FSDP's hooks gather and reduce, which is right on one stage.
    ``max_gathered`` stages of a rank, the next ones that it runs, may be gathered at one time; None: all, each once in
    the step.
    """
    if receives_ahead < 0 or (max_gathered is not None and max_gathered < 1):
        raise ScheduleError(
            f"receives_ahead={receives_ahead} must not be negative, and max_gathered={max_gathered} must be 1 or more"
        )
    validate(schedule, lowered=False)
    receives = _receives(schedule, receives_ahead)
    rows: list[list[Action]] = []
    for rank, row in enumerate(schedule.actions):
        before, after = receives[rank], _Added()
        for index, action in enumerate(row):
            after[index] = [send for part in action.passes if (send := schedule.send_of(part)) is not None]
        if hold_weights:
            _add_weights(row, before, after, max_gathered or len(schedule.stages_of(rank)))
        rows.append([step for i, action in enumerate(row) for step in (*before[i], action, *after[i])])
    return schedule.with_actions(rows)


def _receives(schedule: Schedule, ahead: int) -> list[_Added]:
    """Return, for each rank, the receives to post before its action i.

    A receive is posted ``ahead`` actions before its use, or earlier: while the sender still computes what it will send,
    if each action takes one second. So the receive is there when a send waits for it, and no two ranks wait at sends
    for each other.
    """
    timeline = simulate(schedule, lambda _: 1)
    ends = [[event.end for event in row] for row in timeline.events]
    used_at: dict[tuple[Kind, int | None, int | None], int] = {}  # a receive -> the action of its rank that needs it
    for row in schedule.actions:
        for index, action in enumerate(row):
            for part in action.passes:
                if part.kind in RECEIVE_FOR:
                    used_at[RECEIVE_FOR[part.kind], part.stage, part.micro_batch] = index
    channels: dict[tuple[Kind, int, int], list[tuple[int, Action]]] = defaultdict(list)
    for sender, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for send in filter(None, map(schedule.send_of, action.passes)):
                assert send.peer is not None
                receive = send.receive(sender)
                use = used_at[receive.kind, receive.stage, receive.micro_batch]
                is_sent_at = bisect_left(ends[send.peer], ends[sender][index])
                channels[send.kind, sender, send.peer].append((max(0, min(use - ahead, is_sent_at)), receive))
    before: list[_Added] = [defaultdict(list) for _ in schedule.actions]
    for (_, _, receiver), receives in channels.items():
        # A receive is posted no later than the next one of its channel.
        latest = [*accumulate((index for index, _ in reversed(receives)), min)][::-1]
        for index, (_, receive) in zip(latest, receives, strict=True):
            before[receiver][index].append(receive)
    return before


def _add_weights(row: tuple[Action, ...], before: _Added, after: _Added, max_gathered: int) -> None:
    """Add ``UNSHARD`` and ``RESHARD``, so that the next ``max_gathered`` stages are gathered, and ``REDUCE``."""
    stages = [[part.stage for part in action.passes] for action in row]
    last_backward = {
        part.stage: index for index, action in enumerate(row) for part in action.passes if part.kind is not Kind.F
    }
    gathered: list[int | None] = []
    for index in range(len(row)):
        coming = _next_stages(islice(stages, index, None), max_gathered)
        before[index] += [Action(Kind.RESHARD, stage) for stage in gathered if stage not in coming]
        before[index] += [Action(Kind.UNSHARD, stage) for stage in coming if stage not in gathered]
        gathered = coming
        after[index] += [Action(Kind.REDUCE, s) for s in dict.fromkeys(stages[index]) if last_backward.get(s) == index]
    if row:
        after[len(row) - 1] += [Action(Kind.RESHARD, stage) for stage in gathered]
    for index, (first, _, last) in enumerate(with_weights(row)):
        before[index] += first
        after[index] += last


def _next_stages(stages: Iterable[list[int | None]], count: int) -> list[int | None]:
    """Return the next ``count`` different stages that run; more, if the next action alone has more."""
    coming: dict[int | None, None] = {}
    for of_action in stages:
        if len(coming) >= count:
            break
        coming |= dict.fromkeys(of_action)
    return list(coming)
