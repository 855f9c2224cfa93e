"""Packs are dealt to data-parallel ranks by cost."""

from __future__ import annotations

import numpy as np
import pytest

from omnitrain.plan import Placement, Topology
from omnitrain.plan.step import Rates
from omnitrain.plan.wavefront.step import CostOrder, dealt_packs, step_seconds
from tests.plan.wavefront.test_step import tables_of


def skewed(packs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, 1.5, packs)


def as_drawn(work: np.ndarray, lanes: int) -> list[np.ndarray]:
    return list(np.arange(len(work)).reshape(lanes, -1))


@pytest.mark.parametrize("lanes", [8, 64])
def test_the_costs_of_ranks_are_within_two_percent_of_what_is_possible(lanes: int) -> None:
    work = skewed(64 * lanes)
    dealt = dealt_packs(work, np.zeros(len(work)), lanes, coupled=False)
    assert {len(packs) for packs in dealt} == {64} and sorted(np.concatenate(dealt)) == list(range(64 * lanes))
    sums, drawn = (np.array([work[packs].sum() for packs in of_lanes]) for of_lanes in (dealt, as_drawn(work, lanes)))
    assert sums.max() <= 1.02 * max(sums.mean(), work.max()) < 1.3 * 1.02 * sums.mean() < 1.02 * drawn.max()


def test_coupled_ranks_run_packs_of_about_the_same_cost_together() -> None:
    work, lanes = skewed(128), 8
    drawn = as_drawn(work, lanes)
    dealt = dealt_packs(work, np.zeros(128), lanes, coupled=True)
    longest = step_seconds(work, np.zeros(128), dealt, coupled=True)
    assert longest < 1.3 * work.sum() / lanes < 0.7 * step_seconds(work, np.zeros(128), drawn, coupled=True)


def test_encoders_are_balanced_too() -> None:
    work, load = skewed(128), np.where(np.arange(128) < 32, 3.0 * skewed(128, 1), 0.0)
    drawn = as_drawn(work, 8)
    for coupled in (False, True):
        seconds = step_seconds(work, load, dealt_packs(work, load, 8, coupled=coupled), coupled=coupled)
        assert seconds < 0.6 * step_seconds(work, load, drawn, coupled=coupled)


def test_packs_stay_where_they_were_drawn_if_that_is_as_fast() -> None:
    work = np.tile([3.0, 2.0, 1.0], 4)
    dealt = dealt_packs(work, np.zeros(12), 4, coupled=True)
    assert [packs.tolist() for packs in dealt] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_the_cost_of_a_pack_has_the_squares_of_its_lengths_and_the_items_of_its_encoders() -> None:
    """Two packs of 40 tokens: one sample of 40 costs as much as four of 10 only without attention."""
    vision = Placement("vision", (0, 1), ("vision",))
    topology = Topology(2, (vision, Placement("foundation", (0, 1), reads_packs=True)), ("text",))
    tables = tables_of(topology, {0: [([40], []), ([40], [])], 1: [([10] * 4, []), ([10] * 4, [])]})
    assert tables.squares.tolist() == [[1600, 400], [1600, 400]]
    order = CostOrder((), coupled=False)
    for quadratic, expected in ((0.0, [[0, 0], [1, 1]]), (0.1, [[0, 1], [0, 1]])):
        found = order(topology, tables, Rates(1.0, {}, quadratic))
        assert [sorted(lane.lane.tolist()) for lane in found] == expected
    media = tables_of(topology, {0: [([9], [50]), ([9], [50])], 1: [([9], []), ([9], [])]})
    dealt = CostOrder(("vision",), coupled=False)(topology, media, Rates(1.0, {"vision": 1.0}))
    assert [sorted(lane.lane.tolist()) for lane in dealt] == [[0, 1], [0, 1]]


def test_lanes_of_a_few_packs_are_evened_by_swaps() -> None:
    work = 1.0 + skewed(8 * 64, seed=3).clip(max=4.0)
    dealt = dealt_packs(work, np.zeros(len(work)), 64, coupled=False)
    assert {len(packs) for packs in dealt} == {8} and sorted(np.concatenate(dealt)) == list(range(8 * 64))
    sums = np.array([work[packs].sum() for packs in dealt])
    assert sums.max() <= 1.005 * sums.mean()
