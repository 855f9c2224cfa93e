"""The table of a step in ``main``: forwards and backwards, windows of encoders, messages and gathers of weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from omnitrain.plan.placement import PipelineShape, Placement
from omnitrain.plan.schedule.actions import Schedule
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.generators import generate, one_f_one_b
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.validate import validate


def table_of(pipeline: PipelineShape, num_micro_batches: int, placements: Iterable[Placement] = ()) -> Schedule:
    """Return the schedule of the foundation's pipeline, or of gradient accumulation, or raise ScheduleError.

    That of a pipeline has all sends, receives and gathers, and was validated.
    ``placements``: those with an edge ``exchange`` are encoded by actions of all pipeline ranks.
    """
    return _complete(pipeline, num_micro_batches, tuple(one for one in placements if one.edge == "exchange"))


@lru_cache(maxsize=32)
def _complete(pipeline: PipelineShape, num_micro_batches: int, encoders: tuple[Placement, ...]) -> Schedule:
    schedule = with_encoders(only_passes(pipeline, num_micro_batches), encoders)
    if pipeline.is_cut:
        schedule = lower(schedule)
        validate(schedule)
    return schedule


@lru_cache(maxsize=32)
def only_passes(pipeline: PipelineShape, num_micro_batches: int) -> Schedule:
    """Return only the forwards and backwards of a step; see :func:`table_of`."""
    if pipeline.is_cut:
        return generate(num_micro_batches=num_micro_batches, **pipeline._asdict())
    return one_f_one_b(1, num_micro_batches, extra_warm_up=pipeline.extra_forwards)
