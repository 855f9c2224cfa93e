"""Encoders as actions of a schedule, outside of the forwards of micro-batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from omnitrain.plan.placement import Placement
from omnitrain.plan.schedule.actions import FOUNDATION, Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import Event, simulate

# A backward takes about twice as long as a forward.
_SECONDS = {Kind.F: 1, Kind.I: 1, Kind.W: 1}
_FORWARDS, _BACKWARDS = {Kind.F, Kind.ENCODE, Kind.HEAD}, {Kind.B, Kind.ENCODE_B}


def with_encoders(schedule: Schedule, encoders: Sequence[Placement]) -> Schedule:
    """Return a schedule with ``ENCODE``, ``EXCHANGE`` and ``ENCODE_B`` for each window of each component.

    These are collectives over all pipeline ranks. A window is encoded when the first stage needs the features of its
    first micro-batch, and its backward comes when the first stage has the gradients of its last one: each rank runs
    them before its first action that starts later than that, if a backward takes twice as long as a forward. What they
    need has then started earlier on every rank, so no rank waits in a circle. ``encoders`` encode in order; their
    backwards come in the opposite order.
    """
    if not encoders or not schedule.num_micro_batches:
        return schedule
    events = simulate(schedule, _SECONDS).events
    timed = sorted(_timed(encoders, schedule.num_micro_batches, events[schedule.stage_ranks[0]]))
    rows = []
    for row, of_rank in zip(schedule.actions, events, strict=True):
        starts = [event.start for event in of_rank]
        before: list[list[Action]] = [[] for _ in range(len(row) + 1)]
        for (seconds, *_), action in timed:
            before[bisect_left(starts, seconds)].append(action)
        rows.append([step for index, actions in enumerate(before) for step in (*actions, *row[index : index + 1])])
    return schedule.with_actions(rows)


def _timed(
    encoders: Sequence[Placement], num_micro_batches: int, of_first_stage: Sequence[Event]
) -> Iterator[tuple[tuple[float, ...], Action]]:
    """Yield each action of an encoder after what decides its place: first the seconds before which it must come."""
    actions = [event.action for event in of_first_stage]
    for order, encoder in enumerate(encoders):
        first, last = uses_of_windows(actions, encoder.window or num_micro_batches)
        for window, index in first.items():
            encode = Action(Kind.ENCODE, micro_batch=window, component=encoder.name)
            yield (of_first_stage[index].start, 1, order, 0), encode
            yield (of_first_stage[index].start, 1, order, 1), encode._replace(kind=Kind.EXCHANGE)
            if encoder.is_trained:
                yield (of_first_stage[last[window]].end, 0, -order, 0), encode._replace(kind=Kind.ENCODE_B)


def uses_of_windows(row: Sequence[Action], size: int, stage: int = 0) -> tuple[dict[int, int], dict[int, int]]:
    """Return window -> indices in ``row`` of the first action that reads its features, and of their last backward.

    ``stage``: the one that reads them.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(row):
        for part in action.passes:
            if part.stage == stage and part.component == FOUNDATION and part.kind is not Kind.W:
                assert part.micro_batch is not None
                window = part.micro_batch - part.micro_batch % size
                if part.kind is Kind.F:
                    first.setdefault(window, index)
                else:
                    last[window] = index
    return first, last


def with_weights(row: Sequence[Action]) -> Iterator[tuple[list[Action], Action, list[Action]]]:
    """Yield each action of a rank with the actions before and after it, for the weights of the component it encodes.

    They are gathered for each of its passes, and its gradients are reduced after its last backward.
    """
    last_backward = {a._replace(micro_batch=None): index for index, a in enumerate(row) if a.kind in _BACKWARDS}
    for index, action in enumerate(row):
        if action.component == FOUNDATION or action.kind not in _FORWARDS | _BACKWARDS:
            yield [], action, []
            continue
        is_last = last_backward.get(action._replace(micro_batch=None)) == index
        weights = Action(Kind.UNSHARD, action.stage, component=action.component)
        after = [weights._replace(kind=kind) for kind in [Kind.REDUCE] * is_last + [Kind.RESHARD]]
        yield [weights], action, after
