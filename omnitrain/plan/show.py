"""A step plan for people: one line per component and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omnitrain.plan.step import StepPlan
from omnitrain.plan.topology import PlannedComponent


@dataclass(frozen=True)
class ComponentLine:
    """What a component does in a micro-batch.

    Attributes:
        micro_batch: which.
        component: its name.
        calls: of each of its ranks.
        items: it encodes.
        travelling: of them, those that some other rank than their producer needs.
        minimal_ranks: ranks that make at least one call with the minimal input.
        imbalance: cost of the busiest rank over the mean; 1 where nothing costs anything.
        reduces: it is the component's last active micro-batch.
    """

    micro_batch: int
    component: str
    calls: int
    items: int
    travelling: int
    minimal_ranks: int
    imbalance: float
    reduces: bool


def component_lines(plan: StepPlan) -> tuple[ComponentLine, ...]:
    """A line for each component in each micro-batch in which it runs."""
    lines = []
    for component in plan.topology.components:
        loads, last = plan.loads(component.name), plan.last_active(component.name)
        lines += [
            _line(plan, component, micro_batch, loads[micro_batch], micro_batch == last)
            for micro_batch in range(plan.num_micro_batches)
            if plan.is_active(component.name, micro_batch)
        ]
    return tuple(sorted(lines, key=lambda line: line.micro_batch))


def step_text(plan: StepPlan) -> str:
    """``str(plan)``: counts, tokens and the lines of :func:`component_lines`."""
    counts = ", ".join(f"{name} {count:,}" for name, count in plan.loss_counts.items())
    tokens = plan.tokens.sum(axis=0)
    head = [
        f"step plan {plan.digest()}: {plan.topology.world_size} ranks, {plan.num_micro_batches} micro-batches"
        + (", the last of the data" if plan.is_last else ""),
        f"predicted tokens: {counts or 'none'}",
        f"tokens drawn: {int(tokens.sum()):,}, per rank {int(tokens.min()):,} to {int(tokens.max()):,}",
    ]
    titles = ("micro-batch", "component", "calls", "items", "travel", "minimal on", "max/mean cost", "reduces")
    rows = [
        (
            str(line.micro_batch),
            line.component,
            str(line.calls),
            str(line.items),
            str(line.travelling),
            f"{line.minimal_ranks} ranks",
            f"{line.imbalance:.2f}",
            "yes" if line.reduces else "",
        )
        for line in component_lines(plan)
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows))
    return "\n".join([*head, *(line.rstrip() for line in table)])


def _line(
    plan: StepPlan, component: PlannedComponent, micro_batch: int, loads: np.ndarray, reduces: bool
) -> ComponentLine:
    entrances = list(plan.topology.entrances_of(component.name))
    calls = plan.calls[micro_batch, entrances]
    own = plan.own_calls[micro_batch][entrances][:, list(component.ranks)]
    routes = plan.routes(component.name, micro_batch)
    travels = (routes.producer != routes.consumer) & plan.topology.moves(component.name)
    return ComponentLine(
        micro_batch=micro_batch,
        component=component.name,
        calls=int(calls.sum()),
        items=len(np.unique(routes.item)),
        travelling=len(np.unique(routes.item[travels])),
        minimal_ranks=int((own < calls[:, None]).any(axis=0).sum()),
        imbalance=float(loads.max() / loads.mean()) if loads.any() else 1.0,
        reduces=reduces,
    )
