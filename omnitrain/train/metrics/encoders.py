"""Metrics of the encoders of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.windows import bytes_per_feature
from omnitrain.plan.step import StepPlan
from omnitrain.recipe.parallel import MAIN
from omnitrain.train.metrics.step_timing import EncoderTimes

_LISTED_RANKS = 16  # with more, a line of metrics has no list of them


def cost_metrics(costs: np.ndarray) -> dict[str, Any]:
    """Return least, mean and largest of the costs of ranks, ``[ranks]`` int64; and ``by_rank`` if there are few."""
    found: dict[str, Any] = {"min": int(costs.min()), "mean": float(costs.mean()), "max": int(costs.max())}
    return found | ({"by_rank": costs.tolist()} if len(costs) <= _LISTED_RANKS else {})


def encoder_metrics(model: OmniModel, plan: StepPlan, times: Mapping[str, EncoderTimes]) -> dict[str, Any]:
    """Return ``encoders``: encoder -> how its work is divided among ranks; nothing on one rank, or without media."""
    layout = layout_of(model)
    if layout is None or plan.topology.world_size == 1:
        return {}
    rows = {}
    for name in model.media_names:
        if (balance := plan.balance(name)) is not None:
            moved = plan.features_moved(name) * bytes_per_feature(model, name, layout.components[name].plan)
            taken = times.get(name, EncoderTimes(0.0, 0.0, 0.0))
            cost = cost_metrics(plan.loads(name).sum(axis=0))
            rows[name] = {**balance._asdict(), "cost": cost, "bytes_moved": moved, "waited": taken.waited}
            if layout.states[name].section != MAIN:
                rows[name] |= {"busy": taken.busy, "busy_share": taken.busy_share}
    return {"encoders": rows} if rows else {}
