"""Pipeline schedules as data: made, completed, checked and simulated without a device."""

from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.generators import (
    Placement,
    accumulate,
    gpipe,
    interleaved,
    one_f_one_b,
    stage_of,
    stage_ranks,
    zbv,
)
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.simulate import DeadlockError, Event, Link, Stream, Timeline, Wait, simulate
from omnitrain.plan.schedule.validate import Problem, problems_in, validate

__all__ = [
    "Action",
    "DeadlockError",
    "Event",
    "Kind",
    "Link",
    "Placement",
    "Problem",
    "Schedule",
    "Stream",
    "Timeline",
    "Wait",
    "accumulate",
    "gpipe",
    "interleaved",
    "lower",
    "one_f_one_b",
    "problems_in",
    "simulate",
    "stage_of",
    "stage_ranks",
    "validate",
    "zbv",
]
