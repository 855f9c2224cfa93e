"""Assign items to workers by cost, for many independent problems at once."""

from __future__ import annotations

import heapq

import numpy as np


def assign_by_cost(problem: np.ndarray, cost: np.ndarray, num_workers: np.ndarray) -> np.ndarray:
    """Give each item, costliest first, to the least loaded worker of its problem (Graham 1969).

    Ties follow the order of items and workers, so equal arguments give equal results on every machine. ``problem`` and
    ``cost`` are ``[items]`` int64; returns ``[items]`` int64, the index of each item's worker within its problem.
    """
    order = np.lexsort((-cost, problem))
    ends = np.cumsum(np.bincount(problem, minlength=len(num_workers)))
    assigned = np.empty(len(order), dtype=np.int64)
    for number, items in zip(num_workers.tolist(), np.split(order, ends[:-1]), strict=True):
        heap = list(range(number))  # of ``load * number + worker``
        added = (number * own for own in cost[items].tolist())
        assigned[items] = [heapq.heapreplace(heap, heap[0] + more) % number for more in added]
    return assigned
