"""The schedule of a step of a model."""

from __future__ import annotations

from collections.abc import Mapping

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.plan import StepPlan
from omnitrain.plan.schedule.actions import Action, Kind, Schedule, SectionWindows
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.recipe.parallel import FOUNDATION


def schedule_of(model: OmniModel, plan: StepPlan, upcoming: StepPlan | None = None) -> Schedule:
    """Return the schedule of a step: gradient accumulation, or that of the model's pipeline; and that of each section.

    Args:
        model: parallelized, or on one process.
        plan: of the step.
        upcoming: of the next step, for sections that encode ahead; None: the last one, or no section of this rank does.
    """
    if not plan.num_micro_batches:
        return Schedule(((),), (0,), 0)
    layout, schedule = layout_of(model), plan.schedule
    if layout is None or not layout.sections:
        return schedule
    estimate = _Estimate(plan, schedule.num_stages // schedule.num_pipeline_ranks)
    sections = [section_windows(layout, plan, name, upcoming) for name in layout.sections]
    return with_sections(schedule, sections, estimate.seconds, estimate.encoding)


def section_windows(layout: ModelLayout, plan: StepPlan, name: str, upcoming: StepPlan | None = None) -> SectionWindows:
    """Return the windows of a section in a step; see :func:`schedule_of`."""
    section = layout.sections[name]
    placements = [c for c in plan.topology.components if c.name in section.components]
    in_order = [c.name for c in placements]
    ahead = _windows(upcoming, in_order, section.micro_batch) if upcoming is not None and section.ahead else {}
    return SectionWindows(
        name=name,
        encoded=_windows(plan, in_order, section.micro_batch),
        trained=frozenset(c.name for c in placements if c.is_trained),
        size=section.micro_batch,
        slots=section.slots,
        in_flight=section.in_flight,
        encode_twice=section.encode_twice,
        is_encoded=any(edge.has_kept(plan) for c, edge in layout.edges.items() if c in in_order),
        upcoming={c: [plan.num_micro_batches + window for window in windows] for c, windows in ahead.items()},
        reads={c.name: c.reads for c in placements if c.reads},
        at_end=not plan.topology.at_end.isdisjoint(in_order),
        heads={name: _micro_batches_of_head(plan, name) for name in plan.topology.heads_apart if name in in_order},
    )


def _micro_batches_of_head(plan: StepPlan, decoder: str) -> list[int]:
    """The micro-batches in which a decoder has targets."""
    return [k for k in range(plan.num_micro_batches) if decoder in plan.calls_and_heads(k)[1]]


def _windows(plan: StepPlan, components: list[str], size: int) -> dict[str, list[int]]:
    """Component -> first micro-batches of the windows in which it has items."""
    starts = range(0, plan.num_micro_batches, size)
    return {component: [start for start in starts if plan.is_active(component, start)] for component in components}


_PARTS: Mapping[Kind, int] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


class _Estimate:
    """The seconds of a step's actions, from the rates of its plan: a backward takes twice as long as a forward."""

    def __init__(self, plan: StepPlan, chunks: int) -> None:
        assert plan.rates is not None
        self._forwards = plan.rates.per_token / (3 * chunks) * plan.tokens.max(axis=1)
        self._encodes = {name: rate * plan.loads(name).max(axis=1) for name, rate in plan.rates.per_cost.items()}

    def seconds(self, action: Action) -> float:
        if action.micro_batch is None or action.kind not in _PARTS or action.component != FOUNDATION:
            return sum(map(self.seconds, action.parts))
        return float(self._forwards[action.micro_batch]) * _PARTS[action.kind]

    def encoding(self, component: str, window: int) -> float:
        return float(self._encodes[component][window])
