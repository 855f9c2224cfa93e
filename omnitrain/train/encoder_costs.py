"""Measure the cost of items in the first steps of a run."""

from __future__ import annotations

from collections import defaultdict

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.timing import Recorded
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.item_costs import (
    MEASURED_STEPS,
    UNUSED_STEPS,
    WARM_UP,
    MeasuredCosts,
    encoded_in,
    measured_components,
    publish,
)
from omnitrain.plan.item_cost import Encoded, fitted_quadratic
from omnitrain.plan.step import StepPlan
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.state import TrainingState


class EncoderCosts:
    """Fits the quadratic part of items' costs for components with ``quadratic_cost: measured``.

    Args:
        model: the model, sharded or in one process.
        ranks: ranks of the run.
        state: what an earlier part of the run measured, and its steps. If it measured nothing, this part does.

    Attributes:
        settled: component -> what was measured; None: nothing, or not yet.
        unused_until: the last step that is planned without it.
    """

    def __init__(self, model: OmniModel, ranks: Ranks, state: TrainingState) -> None:
        self._components, self._ranks = measured_components(model) if ranks.peers.size > 1 else (), ranks
        known = state.quadratic_costs
        self.settled = known if known is not None and known.keys() >= set(self._components) else None
        self._done_before = state.step
        self.unused_until = state.step + UNUSED_STEPS if self.settled is None else state.quadratic_costs_unused_until
        self._of_planner: MeasuredCosts | None = None
        layout = layout_of(model)
        self._rank = 0 if layout is None or ranks.state is None else layout.planned_ranks.index(ranks.state.rank)
        self._encoded: defaultdict[str, list[Encoded]] = defaultdict(list)

    def of_planner(self) -> MeasuredCosts | None:
        """Return what the planner of this rank needs; None: nothing is measured."""
        if self._components:
            at = self._ranks.rendezvous
            self._of_planner = MeasuredCosts(self._done_before, self.unused_until, self.settled, at)
        return self._of_planner

    def restart(self, step: int) -> None:
        """Say that ``step`` steps are done when the data processes start to plan, again after Ctrl-C."""
        if self._of_planner is not None:
            self._of_planner.step, self._of_planner.settled = step, self.settled

    def measures(self, step: int) -> bool:
        """Whether step number ``step`` (from 1) is measured."""
        return bool(self._components) and self.settled is None and step <= self._done_before + MEASURED_STEPS

    def add(self, step: int, plan: StepPlan, recorded: Recorded) -> None:
        """Add a measured step; after the last one all ranks agree on what was measured. All ranks call this."""
        for name in self._components if step > self._done_before + WARM_UP else ():
            spans = [span for span in recorded.spans if span.what.name == "encode" and span.what.layer == name]
            seconds = sum(span.seconds for span in spans)
            self._encoded[name].append(encoded_in(plan, self._rank, name, seconds))
        if step == self._done_before + MEASURED_STEPS:
            of_ranks = self._ranks.peers.gather(dict(self._encoded))
            rows = {name: [row for of_rank in of_ranks for row in of_rank.get(name, [])] for name in self._components}
            self.settled = {name: fitted_quadratic(own) for name, own in rows.items()}
            publish(self._ranks.rendezvous, self.settled)
