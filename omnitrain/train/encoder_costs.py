"""Measure in the first steps of a run what its plans need: the cost of items and samples, and the seconds of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.timing import Recorded, Span
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.item_costs import (
    MEASURED_STEPS,
    UNUSED_STEPS,
    WARM_UP,
    Measured,
    MeasuredCosts,
    encoded_in,
    measured_components,
    publish,
)
from omnitrain.parallel.step.order import deals_packs, encoders_of_own_packs
from omnitrain.plan.item_cost import Encoded, fitted_quadratic
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.step import StepPlan
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.save import TrainingState


class EncoderCosts:
    """Fits the quadratic part of the cost of components with ``quadratic_cost: measured``.

    With sections, it also measures how long their encoders and the first stage take, from which steps are ordered; and
    where packs are dealt by cost, how long the foundation and the encoders of a rank's own packs take. If ``state`` has
    what an earlier part of the run measured, nothing is measured again. ``settled``: what was measured; None: nothing,
    or not yet. ``unused_until``: the last step that is planned without it.
    """

    def __init__(self, model: OmniModel, ranks: Ranks, state: TrainingState) -> None:
        layout, self._ranks, self._rank, self._waits = layout_of(model), ranks, ranks.peers.rank, False
        self._components, self._apart, self._inside = list[str](), list[str](), list[str]()
        if layout is not None and ranks.peers.size > 1:
            self._components = list(measured_components(model))
            self._apart = [name for section in layout.sections.values() for name in section.components]
            self._inside = list(encoders_of_own_packs(model)) if deals_packs(model) else []
            self._waits = layout.states[FOUNDATION].size("fsdp") > 1
        quadratic, seconds = state.quadratic_costs or {}, state.section_seconds or {}
        is_known = quadratic.keys() >= set(self._components) and seconds.keys() >= set(self._timed)
        self.settled = Measured(quadratic, seconds) if is_known and self._names else None
        self._done_before = state.step
        self.unused_until = state.step + UNUSED_STEPS if self.settled is None else state.measured_costs_unused_until
        self._of_planner: MeasuredCosts | None = None
        self._encoded: defaultdict[str, list[Encoded]] = defaultdict(list)

    @property
    def _timed(self) -> list[str]:
        """The components of sections, or of a rank's own packs, and the foundation if there are any."""
        encoders = [*self._apart, *self._inside]
        return [*encoders, FOUNDATION] if encoders else []

    @property
    def _names(self) -> list[str]:
        """All components of which something is measured."""
        return list(dict.fromkeys([*self._components, *self._timed]))

    def of_planner(self) -> MeasuredCosts | None:
        """Return what the planner of this rank needs; None: nothing is measured."""
        if self._names:
            at = self._ranks.rendezvous
            self._of_planner = MeasuredCosts(self._done_before, self.unused_until, self.settled, at)
        return self._of_planner

    def restart(self, step: int) -> None:
        """Say that ``step`` steps are done when the data processes start to plan, again after Ctrl-C."""
        if self._of_planner is not None:
            self._of_planner.step, self._of_planner.settled = step, self.settled

    def measures(self, step: int) -> bool:
        """Whether step number ``step`` (from 1) is measured."""
        return bool(self._names) and self.settled is None and step <= self._done_before + MEASURED_STEPS

    def add(self, step: int, plan: StepPlan, recorded: Recorded) -> None:
        """Add a measured step; after the last one all ranks agree on what was measured. All ranks call this."""
        for name in self._names if step > self._done_before + WARM_UP else ():
            if name == FOUNDATION:
                row = self._of_first_stage(plan, recorded)
            else:
                seconds = seconds_of_forwards(recorded, name, has_actions=name in self._apart)
                row = encoded_in(plan, self._rank, name, seconds)
            self._encoded[name].append(row)
        if step == self._done_before + MEASURED_STEPS:
            of_ranks = self._ranks.peers.gather(dict(self._encoded))
            rows = {name: [row for of_rank in of_ranks for row in of_rank.get(name, [])] for name in self._names}
            quadratic = {name: fitted_quadratic(rows[name]) for name in self._components}
            self.settled = Measured(
                quadratic, {n: _seconds_per_unit(rows[n], quadratic.get(n, 0.0)) for n in self._timed}
            )
            publish(self._ranks.rendezvous, self.settled)

    def _of_first_stage(self, plan: StepPlan, recorded: Recorded) -> Encoded:
        """Samples and seconds of this rank's first stage; if ranks wait for each other, the longest samples count."""
        if self._rank not in plan.topology.readers or plan.topology.first_stage[self._rank] != self._rank:
            return Encoded(0, 0, 0, 0)
        spans = [span for span in recorded.spans if span.what.kind == "action" and Action.parse(span.what.name).passes]
        owners = plan.topology.owners if self._waits else [plan.topology.owner_of(self._rank)]
        longest = plan.squares[:, owners].argmax(axis=1)[:, None]
        tokens, squares = (
            float(np.take_along_axis(found[:, owners], longest, axis=1).sum()) for found in (plan.tokens, plan.squares)
        )
        return Encoded(len(spans), tokens, squares, foundation_seconds(spans, recorded, self._inside))


def foundation_seconds(spans: Sequence[Span], recorded: Recorded, inside: Sequence[str]) -> float:
    """Return the seconds of the foundation's forwards and backwards in a step of a rank.

    The forwards of the encoders ``inside`` do not count. Nothing says how long their backwards take. So a backward of
    the foundation is then taken to be twice as long as its forward; and if forwards and backwards overlap, a
    backward of an encoder is taken to be twice as long as its forward.
    """
    encoding = sum(seconds_of_forwards(recorded, name, has_actions=False) for name in inside)
    if not encoding or any(Action.parse(span.what.name).parts for span in spans):
        return max(0.0, sum(span.seconds for span in spans) - 3 * encoding)
    return 3 * (sum(span.seconds for span in spans if Action.parse(span.what.name).kind is Kind.F) - encoding)


def seconds_of_forwards(recorded: Recorded, component: str, *, has_actions: bool) -> float:
    """Return seconds of encoding each item once; of actions, ``ENCODE`` alone: backwards may repeat it."""
    if has_actions:
        actions = [(Action.parse(s.what.name), s.seconds) for s in recorded.spans if s.what.kind == "action"]
        return sum(seconds for a, seconds in actions if (a.kind, a.component) == (Kind.ENCODE, component))
    return sum(span.seconds for span in recorded.spans if (span.what.name, span.what.layer) == ("encode", component))


def _seconds_per_unit(rows: list[Encoded], quadratic: float) -> float:
    """Seconds per token, or per unit of the cost of items; 0 if nothing was computed."""
    units = sum(row.elements + quadratic * row.squares for row in rows)
    return sum(row.seconds for row in rows if row.elements) / units if units else 0.0
