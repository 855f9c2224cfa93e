"""The cost of encoding an item, fitted to measured seconds."""

from __future__ import annotations

import numpy as np
import pytest

from omnitrain.plan.balance import assign_by_cost
from omnitrain.plan.item_cost import Encoded, fitted_quadratic, item_cost


def steps(linear: float, quadratic: float, per_call: float, noise: float = 0.0) -> list[Encoded]:
    """Twelve steps of four ranks with items of many sizes."""
    rng, found = np.random.default_rng(0), []
    for _ in range(48):
        sizes = rng.lognormal(7, 1, rng.integers(0, 9)).round()
        calls = 1.0 + len(sizes)
        seconds = linear * sizes.sum() + quadratic * (sizes**2).sum() + per_call * calls
        error = 1 + noise * rng.standard_normal()
        found.append(Encoded(calls, float(sizes.sum()), float((sizes**2).sum()), float(seconds * error)))
    return found


@pytest.mark.parametrize(("linear", "quadratic"), [(1e-6, 1e-9), (1e-6, 0), (2e-5, 3e-10)])
@pytest.mark.parametrize("per_call", [0, 1e-3])
def test_the_fit_finds_the_quadratic_part(linear: float, quadratic: float, per_call: float) -> None:
    found = fitted_quadratic(steps(linear, quadratic, per_call))
    assert found == pytest.approx(quadratic / linear, rel=1e-6, abs=1e-12)
    noisy = fitted_quadratic(steps(linear, quadratic, per_call, noise=0.02))
    assert noisy == pytest.approx(quadratic / linear, rel=0.15, abs=5e-5)


def test_no_quadratic_part_is_found_in_items_of_one_size_or_in_nothing() -> None:
    of_one_size = [Encoded(n, 100.0 * n, 1e4 * n, 0.1 * n) for n in (1.0, 2.0, 5.0)]
    nothing = [Encoded(3.0, 0.0, 0.0, 0.1)] * 5
    assert [fitted_quadratic(rows) for rows in (of_one_size, nothing, [], of_one_size[:1])] == [0.0] * 4


def test_a_quadratic_part_is_never_negative() -> None:
    sizes = (100.0, 400.0, 900.0, 1600.0)
    assert fitted_quadratic([Encoded(1.0, size, size**2, size**0.5) for size in sizes]) == 0.0


def test_items_divided_by_the_right_cost_are_balanced() -> None:
    """Twelve images on four ranks, two of them large: the seconds of the busiest rank over the mean."""
    elements = np.array([4000, 4000, *[1000] * 10])
    seconds = elements + 1e-3 * elements**2

    def imbalance(quadratic: float) -> float:
        costs = np.array([item_cost(int(n), quadratic) for n in elements])
        ranks = assign_by_cost(np.zeros(len(costs), dtype=np.int64), costs, np.array([4]))
        loads = np.bincount(ranks, seconds, 4)
        return float(loads.max() / loads.mean())

    assert imbalance(1e-3) == pytest.approx(4 * 20 / 60) and imbalance(0.0) > 1.4
    assert item_cost(1000, 0.0) == 1000 and item_cost(1000, 1e-3) == 2000
