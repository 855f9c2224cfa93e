"""What is counted of a step stays as small as it became."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_at_most_three_operations_lie_between_the_read_of_sizes_and_the_first_exchange_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    counts = importlib.import_module("step_counts")
    assert counts.before_exchange(1) <= 3 and counts.before_exchange(4) <= 3  # chunks
