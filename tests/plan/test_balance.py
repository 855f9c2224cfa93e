import heapq

import numpy as np
import pytest

from omnitrain.plan.balance import assign_by_cost


def heap_loads(costs: list[int], num_workers: int) -> list[int]:
    """Longest processing time first, one by one."""
    heap = [(0, worker) for worker in range(num_workers)]
    for cost in sorted(costs, reverse=True):
        load, worker = heap[0]
        heapq.heapreplace(heap, (load + cost, worker))
    return sorted(load for load, _ in heap)


def loads(problem: np.ndarray, cost: np.ndarray, worker: np.ndarray, index: int, num_workers: int) -> list[int]:
    own = problem == index
    return sorted(np.bincount(worker[own], cost[own], num_workers).astype(int).tolist())


@pytest.mark.parametrize("seed", range(40))
def test_few_items_are_spread_exactly_as_by_longest_processing_time_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_workers = rng.integers(1, 9, rng.integers(1, 5))
    problem = rng.integers(0, len(num_workers), 12)
    cost = rng.integers(1, rng.choice([3, 1000]), 12)
    worker = assign_by_cost(problem, cost, num_workers)
    for index, workers in enumerate(num_workers):
        assert loads(problem, cost, worker, index, workers) == heap_loads(cost[problem == index].tolist(), workers)


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("num_problems", [1, 6])
def test_the_busiest_worker_of_skewed_items_is_as_busy_as_it_must_be(spread: float, num_problems: int) -> None:
    rng = np.random.default_rng(5)
    cost = 1 + rng.lognormal(6, spread, 6000).astype(np.int64)
    problem = rng.integers(0, num_problems, len(cost))
    worker = assign_by_cost(problem, cost, np.full(num_problems, 16))
    for index in range(num_problems):
        own = cost[problem == index]
        unavoidable = max(own.mean() * len(own) / 16, own.max())
        assert loads(problem, cost, worker, index, 16)[-1] <= 1.01 * unavoidable


def test_items_that_cost_nothing_and_problems_without_items_are_no_trouble() -> None:
    worker = assign_by_cost(np.array([2, 2, 2]), np.zeros(3, dtype=np.int64), np.array([1, 4, 2]))
    assert set(worker.tolist()) <= {0, 1}
    assert assign_by_cost(np.zeros(0, np.int64), np.zeros(0, np.int64), np.array([3])).tolist() == []
