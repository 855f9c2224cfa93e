"""Pipeline schedules as data: made, completed, checked and simulated without a device."""

from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.draw import as_json, gantt, grid
from omnitrain.plan.schedule.generators import (
    KINDS,
    Placement,
    accumulate,
    generate,
    gpipe,
    interleaved,
    least_micro_batches,
    one_f_one_b,
    stage_of,
    stage_ranks,
    zbv,
)
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.simulate import DeadlockError, Event, Link, Stream, Timeline, Wait, simulate
from omnitrain.plan.schedule.split import split_by_cost, split_by_numbers
from omnitrain.plan.schedule.validate import Problem, problems_in, validate

__all__ = [
    "KINDS",
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
    "as_json",
    "gantt",
    "generate",
    "gpipe",
    "grid",
    "interleaved",
    "least_micro_batches",
    "lower",
    "one_f_one_b",
    "problems_in",
    "simulate",
    "split_by_cost",
    "split_by_numbers",
    "stage_of",
    "stage_ranks",
    "validate",
    "zbv",
]
