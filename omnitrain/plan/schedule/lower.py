"""Add to a schedule of forwards and backwards the sends and receives between stages, and what FSDP does."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import SEND_OF, Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.plan.schedule.validate import validate


def lower(
    schedule: Schedule, *, receives_ahead: int = 2, hold_weights: bool = True, max_gathered: int | None = None
) -> Schedule:
    """Return the schedule with all actions that a rank needs to run it.

    - ``SEND_F``, ``SEND_B`` directly after the forward or backward whose result they send. Between two stages of one
      rank nothing is sent.
    - ``RECV_F``, ``RECV_B`` ahead of the forward or backward that needs them, in the order in which the other rank
      sends. They only post the receive.
    - ``UNSHARD`` before the first action of a stage, ``REDUCE`` after its last backward, ``RESHARD`` after its last
      action.

    Args:
        schedule: forwards and backwards of each rank.
        receives_ahead: a receive is posted at least this many forwards and backwards ahead of the one that needs it;
            earlier where a send that waits for its receive (NCCL) would stop the schedule.
        hold_weights: whether the schedule says when weights are gathered and gradients reduced. False: FSDP's hooks do
            both in each forward and backward, which is right on one stage.
        max_gathered: number of stages of a rank whose weights may be gathered at one time, the next ones that it runs.
            None: all, so that each is gathered once in the step.

    Raises:
        ScheduleError: a number is out of range, or the forwards and backwards are incomplete or stop.
    """
    if receives_ahead < 0 or (max_gathered is not None and max_gathered < 1):
        raise ScheduleError(
            f"receives_ahead={receives_ahead} must not be negative, and max_gathered={max_gathered} must be 1 or more"
        )
    validate(schedule, lowered=False)
    receives = _receives(schedule, receives_ahead)
    rows: list[list[Action]] = []
    for rank, row in enumerate(schedule.actions):
        before: dict[int, list[Action]] = receives[rank]
        after: dict[int, list[Action]] = {i: list(_sends(schedule, rank, action)) for i, action in enumerate(row)}
        if hold_weights:
            _add_weights(row, before, after, max_gathered or len(schedule.stages_of(rank)))
            _add_weights_of_encoders(row, before, after)
        rows.append([step for i, action in enumerate(row) for step in (*before[i], action, *after[i])])
    return schedule.with_actions(rows)


def _sends(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    """Yield the sends of an action's results to other ranks."""
    for part in action.passes:
        if part.kind is Kind.W or part.stage is None:
            continue
        next_stage = part.stage + (1 if part.kind is Kind.F else -1)
        if 0 <= next_stage < schedule.num_stages and schedule.stage_ranks[next_stage] != rank:
            yield part._replace(kind=SEND_OF[part.kind], peer=schedule.stage_ranks[next_stage])


def _receives(schedule: Schedule, ahead: int) -> list[dict[int, list[Action]]]:
    """Return, for each rank, the receives to post before its action i.

    A receive is posted ``ahead`` actions before its use, or earlier: while the sender still computes what it will send,
    if each action takes one second. So the receive is there when a send waits for it, and no two ranks wait at sends
    for each other.
    """
    timeline = simulate(schedule, lambda _: 1)
    ends = [[event.end for event in row] for row in timeline.events]
    used_at = [_uses(row) for row in schedule.actions]
    channels: dict[tuple[Kind, int, int], list[tuple[int, Action]]] = defaultdict(list)
    for sender, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for send in _sends(schedule, sender, action):
                assert send.peer is not None
                receive = send.receive(sender)
                use = used_at[send.peer][receive.kind, receive.stage, receive.micro_batch]
                is_sent_at = bisect_left(ends[send.peer], ends[sender][index])
                channels[send.kind, sender, send.peer].append((max(0, min(use - ahead, is_sent_at)), receive))
    before: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.actions]
    for (_, _, receiver), receives in channels.items():
        latest = len(schedule.actions[receiver])
        posts: list[tuple[int, Action]] = []
        for index, receive in reversed(receives):  # a receive is posted no later than the next one of its channel
            latest = min(latest, index)
            posts.append((latest, receive))
        for index, receive in reversed(posts):
            before[receiver][index].append(receive)
    return before


def _uses(row: Iterable[Action]) -> dict[tuple[Kind, int | None, int | None], int]:
    """Return the index of the action of a rank that needs each receive."""
    receive = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    return {
        (receive[part.kind], part.stage, part.micro_batch): index
        for index, action in enumerate(row)
        for part in action.passes
        if part.kind in receive
    }


def _add_weights(
    row: tuple[Action, ...], before: dict[int, list[Action]], after: dict[int, list[Action]], max_gathered: int
) -> None:
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


def _add_weights_of_encoders(
    row: tuple[Action, ...], before: dict[int, list[Action]], after: dict[int, list[Action]]
) -> None:
    """Gather the weights of an encoder for each of its actions, and reduce its gradients after its last backward."""
    last = {action.component: index for index, action in enumerate(row) if action.kind is Kind.ENCODE_B}
    for index, action in enumerate(row):
        if action.kind in (Kind.ENCODE, Kind.ENCODE_B):
            before[index].append(Action(Kind.UNSHARD, component=action.component))
            if action.kind is Kind.ENCODE_B and last[action.component] == index:
                after[index].append(Action(Kind.REDUCE, component=action.component))
            after[index].append(Action(Kind.RESHARD, component=action.component))


def _next_stages(stages: Iterable[list[int | None]], count: int) -> list[int | None]:
    """Return the next ``count`` different stages that run; more, if the next action alone has more."""
    coming: dict[int | None, None] = {}
    for of_action in stages:
        if len(coming) >= count:
            break
        coming |= dict.fromkeys(of_action)
    return list(coming)
