"""The order of a step's micro-batches, if some encoders have ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.plan import StepTables, Topology
from omnitrain.plan.step import Rates
from omnitrain.plan.wavefront.step import Drawn, SectionLimits, StepOrder
from omnitrain.recipe.parallel import FOUNDATION


@dataclass(frozen=True)
class OrderOfRun:
    """Orders the steps of a run with sections. Picklable.

    Attributes:
        order: chooses the order of a step.
        operations: component -> operations of a forward per token; of the foundation, on one pipeline stage.
    """

    order: StepOrder
    operations: Mapping[str, float]

    def rates(self, topology: Topology, tables: StepTables, seconds: Mapping[str, float]) -> Rates:
        """Return how long the work of a step takes.

        Args:
            topology: of the run.
            tables: of the step.
            seconds: what was measured (:class:`~omnitrain.parallel.step.item_costs.Measured`); if something is missing,
                everything is estimated: a token takes as many operations as there are parameters, and a backward twice
                as many.
        """
        components = [name for section in self.order.sections for name in section.components]
        if all(seconds.get(name) for name in (FOUNDATION, *components)):
            return Rates(seconds[FOUNDATION], {name: seconds[name] for name in components})
        medium = tables.slot % max(1, len(topology.media))
        per_cost = {}
        for name in components:
            items = np.isin(medium, list(topology.media_of(name)))
            tokens_per_cost = tables.item_tokens[items].sum() / max(1, tables.cost[items].sum())
            per_cost[name] = float(self.operations[name] * tokens_per_cost)
        return Rates(3 * self.operations[FOUNDATION], per_cost)

    def __call__(self, topology: Topology, tables: StepTables, rates: Rates) -> tuple[Drawn, ...]:
        """Return the micro-batches of each data-parallel rank (:class:`StepOrder`)."""
        return self.order(topology, tables, rates)


def order_of_run(model: OmniModel) -> OrderOfRun | None:
    """Return what orders the steps of a model; None: it has no sections, and each rank runs what it drew.

    Args:
        model: parallelized, or on one process.
    """
    layout = layout_of(model)
    if layout is None or not layout.sections:
        return None
    main = layout.state_of(FOUNDATION)
    sections = tuple(
        SectionLimits(
            tuple(section.components),
            layout.state.of_section(name).world_size,
            section.slots,
            section.in_flight,
            section.encode_twice,
        )
        for name, section in layout.sections.items()
    )
    parameters = {name: sum(p.numel() for p in weights.values()) for name, weights in model.components.items()}
    operations = {name: float(number) for name, number in parameters.items()}
    operations[FOUNDATION] /= layout.components[FOUNDATION].plan.pp or 1
    return OrderOfRun(StepOrder(sections, coupled=main.size("fsdp") > 1), operations)
