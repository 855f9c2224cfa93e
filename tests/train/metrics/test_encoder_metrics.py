"""The line of metrics about encoders."""

from __future__ import annotations

import json

import numpy as np

from omnitrain.train.metrics.step_timing import cost_metrics


def test_few_ranks_are_listed_with_their_costs_and_a_thousand_are_summed_up() -> None:
    assert cost_metrics(np.array([30, 0, 12])) == {"min": 0, "mean": 14.0, "max": 30, "by_rank": [30, 0, 12]}
    assert len(cost_metrics(np.arange(16))["by_rank"]) == 16
    many = cost_metrics(10**15 + np.arange(1000))
    assert many.keys() == {"min", "mean", "max"} and len(json.dumps(many)) < 100
