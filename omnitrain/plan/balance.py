"""Assign items to workers by cost, for many independent problems at once."""

from __future__ import annotations

import heapq

import numpy as np


def assign_by_cost(problem: np.ndarray, cost: np.ndarray, num_workers: np.ndarray) -> np.ndarray:
    """Give each item, costliest first, to the least loaded worker of its problem (Graham 1969).

    Ties follow the order of items and workers, so equal arguments give equal results on every machine. ``problem`` and
    ``cost`` are ``[items]`` int64; returns ``[items]`` int64, the index of each item's worker within its problem.
    """
    most = int(num_workers.max(initial=1))
    heaps = [list(range(number)) for number in num_workers.tolist()]  # of ``load * most + worker``
    order = np.argsort(-cost, kind="stable")
    workers = []
    for index, added in zip(problem[order].tolist(), cost[order].tolist(), strict=True):
        heap = heaps[index]
        workers.append(heapq.heapreplace(heap, heap[0] + added * most) % most)
    assigned = np.empty(len(order), dtype=np.int64)
    assigned[order] = workers
    return assigned
