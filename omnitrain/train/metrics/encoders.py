"""Metrics of the encoders of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.windows import bytes_per_feature
from omnitrain.plan.step import StepPlan


def encoder_metrics(model: OmniModel, plan: StepPlan, waited: Mapping[str, float]) -> dict[str, Any]:
    """Return ``encoders``: encoder -> how its work is divided among ranks; nothing on one rank, or without media.

    Args:
        model: parallelized, or on one process.
        plan: the plan of the step.
        waited: encoder -> seconds for which a rank waited for its features.
    """
    layout = layout_of(model)
    if layout is None or plan.topology.world_size == 1:
        return {}
    rows = {}
    for name in model.media_names:
        if (balance := plan.balance(name)) is not None:
            moved = plan.features_moved(name) * bytes_per_feature(model, name, layout.components[name].plan)
            rows[name] = {**balance._asdict(), "bytes_moved": moved, "waited": waited.get(name, 0.0)}
    return {"encoders": rows} if rows else {}
