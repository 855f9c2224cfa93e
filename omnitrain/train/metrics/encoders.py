"""Metrics of the encoders of a step."""

from __future__ import annotations

from typing import Any

from omnitrain.plan.step import StepPlan


def encoder_metrics(plan: StepPlan) -> dict[str, Any]:
    """Return ``encoders``: encoder -> how its cost is divided among ranks; nothing on one rank, or without media.

    Args:
        plan: the plan of the step.
    """
    if plan.topology.world_size == 1:
        return {}
    balances = {component.name: plan.balance(component.name) for component in plan.topology.components}
    rows = {name: balance._asdict() for name, balance in balances.items() if balance is not None}
    return {"encoders": rows} if rows else {}
