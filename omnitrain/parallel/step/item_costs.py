"""Costs of items that are measured in the first steps of a run, and used from a fixed step on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.rendezvous import Rendezvous
from omnitrain.plan.item_cost import Encoded
from omnitrain.plan.step import StepPlan
from omnitrain.recipe.parallel import FOUNDATION

MEASURED_STEPS = 16  # the first ones of a start that has no measured costs; some of them warm up
WARM_UP = 4
UNUSED_STEPS = 32  # steps are planned ahead; after these, all ranks' data processes can know what was measured
_KEY = "measured costs"
_PATIENCE = timedelta(days=7)


def given_costs(model: OmniModel) -> dict[str, float]:
    """Return component -> the quadratic part of its cost that the plan gives; 0 where it is measured."""
    layout = layout_of(model)
    given = {} if layout is None else {name: c.plan.quadratic_cost for name, c in layout.components.items()}
    return {name: cost if isinstance(cost, float) else 0.0 for name, cost in given.items()}


def measured_components(model: OmniModel) -> tuple[str, ...]:
    """Return the components with ``quadratic_cost: measured`` whose work is divided among ranks by cost."""
    layout = layout_of(model)
    plans = {} if layout is None else {name: layout.components[name].plan for name in (*model.media_names, FOUNDATION)}
    by_cost = {n for n, plan in plans.items() if (plan.place == "world" if n == FOUNDATION else plan.place != "local")}
    return tuple(name for name, plan in plans.items() if plan.quadratic_cost == "measured" and name in by_cost)


class Measured(NamedTuple):
    """What a run measures in its first steps."""

    # component -> the quadratic part of its cost, that of its items or of the foundation's samples
    quadratic: Mapping[str, float] = {}
    # if micro-batches are ordered or dealt by cost: encoder -> seconds of a forward on one rank, per unit of an item's
    # cost; ``foundation`` -> seconds of forward and backward per token on the first stage, or per unit of a sample's
    # cost
    seconds: Mapping[str, float] = {}


def publish(rendezvous: Rendezvous, measured: Measured) -> None:
    """Tell the planners of all ranks the measured costs; rank 0 does."""
    if rendezvous.store is not None:
        rendezvous.store.set(_KEY, json.dumps(measured))


@dataclass(eq=False)
class MeasuredCosts:
    """The measured costs, for each step of a run. Picklable."""

    step: int  # number of steps that are done when planning begins
    unused_until: int  # the last step that is planned without them
    settled: Measured | None  # what was measured before; None: it is measured in this run, and published
    rendezvous: Rendezvous  # where it is published

    def next_step(self) -> Measured:
        """Return what was measured for the next step; empty up to the step ``unused_until``."""
        self.step += 1
        if self.step <= self.unused_until:
            return Measured()
        if self.settled is None:
            at = self.rendezvous
            store = at.store or dist.TCPStore(at.host, at.port, is_master=False, timeout=_PATIENCE)
            self.settled = Measured(*json.loads(store.get(_KEY)))
        return self.settled


def encoded_in(plan: StepPlan, rank: int, component: str, seconds: float) -> Encoded:
    """Return what a rank computed for an encoder in a step; ``seconds``: of all its calls."""
    caller = plan.topology.caller_of(rank, component)
    calls = [call for k in range(plan.num_micro_batches) for call in plan.calls_of(caller, component, k)]
    elements = plan.cost[[item for call in calls for item in call.items]].astype(float)
    return Encoded(len(calls), float(elements.sum()), float((elements**2).sum()), seconds)
