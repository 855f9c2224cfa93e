"""What is counted of a step stays as small as it became."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = ("step_counts_before", "step_counts")


def test_at_most_three_operations_lie_between_the_read_of_sizes_and_the_first_exchange_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    counts = importlib.import_module("step_counts")
    assert counts.before_exchange(1) <= 3 and counts.before_exchange(4) <= 3  # chunks


def test_the_figures_of_the_last_run_are_those_that_were_asked() -> None:
    before, after = (json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["figures"] for name in RESULTS)
    assert before["operations_before_exchange"] == 27 and after["operations_before_exchange"] <= 3
    assert before["waits_mixed"] == 18 and after["waits_mixed"] == after["waits_text"] == 0
    assert after["waits_experts_exchange"] == 2  # one in each of two layers
