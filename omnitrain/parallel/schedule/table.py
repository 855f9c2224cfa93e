"""The schedule of a step of a model."""

from __future__ import annotations

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.pipeline.apply import complete_schedule
from omnitrain.plan import StepPlan
from omnitrain.plan.schedule.actions import Schedule
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.generators import accumulate
from omnitrain.recipe.parallel import FOUNDATION


def schedule_of(model: OmniModel, plan: StepPlan) -> Schedule:
    """Return the schedule of a step: gradient accumulation, or that of the model's pipeline.

    Args:
        model: parallelized, or on one process.
        plan: of the step.
    """
    layout, num_micro_batches = layout_of(model), plan.num_micro_batches
    encoders = () if layout is None else layout.encoders(plan)
    if layout is not None and layout.pipeline is not None:
        return layout.pipeline.schedule_of(num_micro_batches, encoders)
    if not num_micro_batches:
        return Schedule(((),), (0,), 0)
    settings = None if layout is None else layout.components[FOUNDATION].plan.schedule
    if settings is not None and settings.overlap:
        return complete_schedule(settings, 1, num_micro_batches, encoders)
    return with_encoders(accumulate(num_micro_batches), encoders)
