"""The order of a step's micro-batches, if some encoders have ranks of their own, or packs are dealt by cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.plan import StepTables, Topology
from omnitrain.plan.step import Rates
from omnitrain.plan.wavefront.step import CostOrder, SectionLimits, StepOrder
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.plan_groups import PipelineSchedule


@dataclass(frozen=True)
class OrderOfRun:
    """Orders the steps of a run with sections, or with ``place: world`` of the foundation. Picklable."""

    order: StepOrder | CostOrder  # chooses the order of a step
    encoders: tuple[str, ...]  # components whose work counts
    # component -> operations of a forward per token; of the foundation, on one pipeline stage
    operations: Mapping[str, float]

    def rates(
        self, topology: Topology, tables: StepTables, seconds: Mapping[str, float], quadratic: float = 0.0
    ) -> Rates:
        """Return how long the work of a step takes.

        Args:
            topology: of the run.
            tables: of the step.
            seconds: what was measured; if something is missing, everything is estimated: a token takes as many
                operations as there are parameters, and a backward twice as many.
            quadratic: the quadratic part of the foundation's time.
        """
        if all(seconds.get(name) for name in (FOUNDATION, *self.encoders)):
            return Rates(seconds[FOUNDATION], {name: seconds[name] for name in self.encoders}, quadratic)
        medium = tables.slot % max(1, len(topology.media))
        per_cost = {}
        for name in self.encoders:
            items = np.isin(medium, list(topology.media_of(name)))
            tokens_per_cost = tables.item_tokens[items].sum() / max(1, tables.cost[items].sum())
            per_cost[name] = float(self.operations[name] * tokens_per_cost)
        return Rates(3 * self.operations[FOUNDATION], per_cost, quadratic)


def deals_packs(model: OmniModel) -> bool:
    """Return whether the packs of a step are dealt to the data-parallel ranks by cost."""
    layout = layout_of(model)
    return layout is not None and not layout.sections and layout.components[FOUNDATION].plan.place == "world"


def encoders_of_own_packs(model: OmniModel) -> tuple[str, ...]:
    """Return the encoders that a rank runs for the items of its own packs, in its forwards."""
    layout = layout_of(model)
    placements = () if layout is None else layout.topology.components
    return tuple(c.name for c in placements if c.media and c.place != "world" and c.edge == "forward")


def order_of_run(model: OmniModel) -> OrderOfRun | None:
    """Return what orders the steps of a model; None: each rank runs what it drew, in order."""
    layout = layout_of(model)
    if layout is None or not (layout.sections or deals_packs(model)):
        return None
    parameters = {name: sum(p.numel() for p in weights.values()) for name, weights in model.components.items()}
    operations = {name: float(number) for name, number in parameters.items()}
    operations[FOUNDATION] /= layout.components[FOUNDATION].plan.pp or 1
    main = layout.states[FOUNDATION]
    coupled = main.size("fsdp") > 1
    if not layout.sections:
        inside = encoders_of_own_packs(model)
        return OrderOfRun(CostOrder(inside, coupled), inside, operations)
    sections = _limits(model, layout)
    foundation = layout.components[FOUNDATION].plan
    further = (foundation.schedule or PipelineSchedule()).extra_forwards + (foundation.pp or 1) - 1
    encoders = tuple(name for section in sections for name in section.components)
    return OrderOfRun(StepOrder(sections, coupled, further), encoders, operations)


def _limits(model: OmniModel, layout: ModelLayout) -> tuple[SectionLimits, ...]:
    """The settings of sections that decide the order."""
    return tuple(
        SectionLimits(
            tuple(of.components),
            layout.state.of_section(name).world_size,
            of.slots,
            of.in_flight,
            of.encode_twice,
            tuple(decoder for decoder in of.components if decoder in model.decoder_names),
        )
        for name, of in layout.sections.items()
    )
