"""Measure the cost of items in the first steps of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.timing import Recorded
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.item_costs import (
    MEASURED_STEPS,
    WARM_UP,
    MeasuredCosts,
    encoded_in,
    measured_components,
    publish,
)
from omnitrain.plan.item_cost import Encoded, fitted_quadratic
from omnitrain.plan.step import StepPlan
from omnitrain.train.process_groups import Ranks


class EncoderCosts:
    """Fits the quadratic part of items' costs for components with ``quadratic_cost: measured``.

    Args:
        model: the model, sharded or in one process.
        ranks: ranks of the run.
        settled: what an earlier part of the run measured.

    Attributes:
        settled: component -> what was measured; None: nothing, or not yet.
    """

    def __init__(self, model: OmniModel, ranks: Ranks, settled: Mapping[str, float] | None) -> None:
        self._components, self._ranks = measured_components(model) if ranks.peers.size > 1 else (), ranks
        self.settled = dict(settled) if settled is not None else None
        layout = layout_of(model)
        self._rank = 0 if layout is None or ranks.state is None else layout.planned_ranks.index(ranks.state.rank)
        self._encoded: defaultdict[str, list[Encoded]] = defaultdict(list)

    def of_planner(self, step: int) -> MeasuredCosts | None:
        """Return what the planner of this rank needs if ``step`` steps are done; None: nothing is measured."""
        return MeasuredCosts(step, self.settled, self._ranks.rendezvous) if self._components else None

    def measures(self, step: int) -> bool:
        """Whether step number ``step`` (from 1) is measured."""
        return bool(self._components) and self.settled is None and step <= MEASURED_STEPS

    def add(self, step: int, plan: StepPlan, recorded: Recorded) -> None:
        """Add a measured step; after the last one all ranks agree on what was measured. All ranks call this."""
        for name in self._components if step > WARM_UP else ():
            spans = [span for span in recorded.spans if span.what.name == "encode" and span.what.layer == name]
            seconds = sum(span.seconds for span in spans)
            self._encoded[name].append(encoded_in(plan, self._rank, name, seconds))
        if step == MEASURED_STEPS:
            of_ranks = self._ranks.peers.gather(dict(self._encoded))
            rows = {name: [row for of_rank in of_ranks for row in of_rank.get(name, [])] for name in self._components}
            self.settled = {name: fitted_quadratic(own) for name, own in rows.items()}
            publish(self._ranks.rendezvous, self.settled)
