"""The schedule of a step of a model."""

from __future__ import annotations

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.plan.schedule.actions import Schedule
from omnitrain.plan.schedule.generators import accumulate


def schedule_of(model: OmniModel, num_micro_batches: int) -> Schedule:
    """Return the schedule of a step: gradient accumulation, or that of the model's pipeline.

    Args:
        model: parallelized, or on one process.
        num_micro_batches: number of micro-batches of the step.
    """
    layout = layout_of(model)
    if layout is None or layout.pipeline is None:
        return Schedule(((),), (0,), 0) if not num_micro_batches else accumulate(num_micro_batches)
    return layout.pipeline.schedule_of(num_micro_batches)
