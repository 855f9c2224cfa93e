"""The schedule of a step of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.parallel.pipeline.apply import schedule_of_plan
from omnitrain.plan import StepPlan
from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.generators import accumulate
from omnitrain.plan.schedule.sections import SectionWindows, with_sections
from omnitrain.plan.schedule.validate import validate
from omnitrain.recipe.parallel import FOUNDATION


def schedule_of(model: OmniModel, plan: StepPlan) -> Schedule:
    """Return the schedule of a step: gradient accumulation, or that of the model's pipeline; and that of each section.

    Args:
        model: parallelized, or on one process.
        plan: of the step.
    """
    layout = layout_of(model)
    schedule = _of_main(layout, plan)
    if layout is None or not layout.sections or not plan.num_micro_batches:
        return schedule
    estimate = _Estimate(model, plan, schedule.num_stages)
    sections = [section_windows(layout, plan, name) for name in layout.sections]
    complete = with_sections(schedule, sections, estimate.seconds, estimate.encoding)
    validate(complete)
    return complete


def _of_main(layout: ModelLayout | None, plan: StepPlan) -> Schedule:
    """The schedule of the ranks that read packs."""
    if not plan.num_micro_batches:
        return Schedule(((),), (0,), 0)
    if layout is None:
        return accumulate(plan.num_micro_batches)
    return schedule_of_plan(layout.components[FOUNDATION].plan, plan.num_micro_batches, layout.encoders(plan))


def section_windows(layout: ModelLayout, plan: StepPlan, name: str) -> SectionWindows:
    """Return the windows of a section in a step."""
    section = layout.sections[name]
    starts = range(0, plan.num_micro_batches, section.micro_batch)
    in_order = [c.name for c in plan.topology.components if c.name in section.components]
    return SectionWindows(
        name=name,
        encoded={c: [start for start in starts if plan.is_active(c, start)] for c in in_order},
        trained=frozenset(c for c in in_order if layout.components[c].is_trained),
        size=section.micro_batch,
        slots=section.slots,
        in_flight=section.in_flight,
        encode_twice=section.encode_twice,
    )


class _Estimate:
    """Times of a step in operations: parameters times tokens, and twice as many in a backward."""

    def __init__(self, model: OmniModel, plan: StepPlan, num_stages: int) -> None:
        self._plan, topology = plan, plan.topology
        parameters = {name: sum(p.numel() for p in weights.values()) for name, weights in model.components.items()}
        self._forwards = parameters[FOUNDATION] / num_stages * plan.tokens.max(axis=1)
        self._encodes: dict[str, np.ndarray] = {}
        for component in topology.components:
            if component.media and topology.is_apart(component.name):
                media, medium = topology.media_of(component.name), plan.slot % len(topology.media)
                items = (medium >= media.start) & (medium < media.stop)
                per_cost = parameters[component.name] * plan.item_tokens[items].sum() / max(1, plan.cost[items].sum())
                self._encodes[component.name] = per_cost * plan.loads(component.name).max(axis=1)

    def seconds(self, action: Action) -> float:
        if action.micro_batch is None or action.kind not in _PARTS or action.component != FOUNDATION:
            return sum(map(self.seconds, action.parts))
        return float(self._forwards[action.micro_batch]) * _PARTS[action.kind]

    def encoding(self, component: str, window: int) -> float:
        return float(self._encodes[component][window])


_PARTS: Mapping[Kind, Any] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
