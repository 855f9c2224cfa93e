"""Encoders as actions of a schedule, outside of the forwards of micro-batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import Event, simulate

# A backward takes about twice as long as a forward.
_SECONDS = {Kind.F: 1, Kind.I: 1, Kind.W: 1}


class EncoderWindows(NamedTuple):
    """A component that all pipeline ranks encode, window by window.

    Attributes:
        component: name of the component.
        size: number of micro-batches in a window.
        is_trained: whether it has a backward.
    """

    component: str
    size: int
    is_trained: bool


def with_encoders(schedule: Schedule, encoders: Sequence[EncoderWindows]) -> Schedule:
    """Return a schedule with ``ENCODE``, ``EXCHANGE`` and ``ENCODE_B`` for each window of each component.

    These are collectives over all pipeline ranks. A window is encoded when the first stage needs the features of its
    first micro-batch, and its backward comes when the first stage has the gradients of its last one: each rank runs
    them before its first action that starts later than that, if a backward takes twice as long as a forward. What they
    need has then started earlier on every rank, so no rank waits in a circle.

    Args:
        schedule: forwards and backwards only (:mod:`~omnitrain.plan.schedule.generators`).
        encoders: the components, in the order in which they encode; their backwards come in the opposite order.
    """
    if not encoders or not schedule.num_micro_batches:
        return schedule
    events = simulate(schedule, _SECONDS).events
    timed = sorted(_timed(schedule, encoders, events[schedule.stage_ranks[0]]))
    rows = []
    for row, of_rank in zip(schedule.actions, events, strict=True):
        starts = [event.start for event in of_rank]
        before: list[list[Action]] = [[] for _ in range(len(row) + 1)]
        for (seconds, *_), action in timed:
            before[bisect_left(starts, seconds)].append(action)
        rows.append([step for index, actions in enumerate(before) for step in (*actions, *row[index : index + 1])])
    return schedule.with_actions(rows)


def _timed(
    schedule: Schedule, encoders: Sequence[EncoderWindows], of_first_stage: Sequence[Event]
) -> Iterator[tuple[tuple[float, ...], Action]]:
    """Yield each action of an encoder after what decides its place: first the seconds before which it must come."""
    first, ends = {}, {}  # micro-batch -> seconds on the first stage
    for event in of_first_stage:
        for part in event.action.passes:
            if part.stage == 0 and part.kind is Kind.F:
                first[part.micro_batch] = event.start
            elif part.stage == 0 and part.kind is not Kind.W:
                ends[part.micro_batch] = event.end
    for order, encoder in enumerate(encoders):
        for start in range(0, schedule.num_micro_batches, encoder.size):
            window = range(start, min(start + encoder.size, schedule.num_micro_batches))
            needed, done = min(first[k] for k in window), max(ends[k] for k in window)
            encode = Action(Kind.ENCODE, micro_batch=start, component=encoder.component)
            yield (needed, 1, order, 0), encode
            yield (needed, 1, order, 1), encode._replace(kind=Kind.EXCHANGE)
            if encoder.is_trained:
                yield (done, 0, -order, 0), encode._replace(kind=Kind.ENCODE_B)
