"""Assign items to workers by cost, longest processing time first, for many independent problems at once."""

from __future__ import annotations

import numpy as np

from omnitrain.plan.radix_sort import stable_order

_ABSENT = np.iinfo(np.int64).max // 2  # load of a worker that a problem does not have; far above any real load
_MIN_ROUNDS = 4  # with fewer rounds, giving items one by one is as fast


def assign_by_cost(problem: np.ndarray, cost: np.ndarray, num_workers: np.ndarray) -> np.ndarray:
    """Give each item, costliest first, to the least loaded worker of its problem (Graham 1969).

    Long runs of items of about equal cost are dealt in rounds that alternate direction, which gives the same loads
    within the cost of one item. Ties follow the order of items and workers, so equal arguments give equal results on
    every machine. ``problem`` and ``cost`` are ``[items]`` int64, not negative, below 2**53 in sum; returns ``[items]``
    int64.
    """
    order = stable_order(problem, cost.max(initial=0) - cost)
    costs = cost[order]
    run_ends = _run_ends(problem[order], costs)
    open_problems = _OpenProblems(num_workers, np.bincount(problem, minlength=len(num_workers)))
    assigned = np.empty(len(order), dtype=np.int64)
    while open_problems.sort():
        rounds = open_problems.rounds_to_deal(costs, run_ends)
        if not rounds.all():
            item, worker = open_problems.give(costs, rounds == 0)
            assigned[order[item]] = worker
        if rounds.any():
            item, worker = open_problems.deal(costs, rounds)
            assigned[order[item]] = worker
    return assigned


def _run_ends(problem: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return ``[items]``: the end of the run of items of the same problem and the same power of 4 in cost."""
    magnitude = costs.astype(np.float64).view(np.int64) >> 53  # the exponent of a double, halved
    starts = np.flatnonzero((np.diff(problem) != 0) | (np.diff(magnitude) != 0)) + 1
    edges = np.concatenate([[0], starts, [len(costs)]])
    return np.repeat(edges[1:], np.diff(edges))


class _OpenProblems:
    """The problems that still have items, one row each.

    ``cursor``, ``end``: ``[problems]``, the next item, and one past the last. ``num_workers``: ``[problems]``.
    ``workers``, ``loads``: ``[problems, most workers]``, least loaded first, and their loads.
    """

    def __init__(self, num_workers: np.ndarray, num_items: np.ndarray) -> None:
        self.end = np.cumsum(num_items)
        self.cursor = self.end - num_items
        self.num_workers = num_workers
        self.workers = np.tile(np.arange(num_workers.max(initial=1)), (len(num_workers), 1))
        self.loads = np.where(self.workers < num_workers[:, None], 0, _ABSENT)

    def sort(self) -> bool:
        """Drop problems without items and sort the workers of the others by load. False if no problem remains."""
        remaining = np.flatnonzero(self.cursor < self.end)
        self.cursor, self.end = self.cursor[remaining], self.end[remaining]
        self.num_workers = self.num_workers[remaining]
        by_load = np.argsort(self.loads[remaining], axis=1, kind="stable")
        self.workers = self.workers[remaining[:, None], by_load]
        self.loads = self.loads[remaining[:, None], by_load]
        return len(remaining) > 0

    def rounds_to_deal(self, costs: np.ndarray, run_ends: np.ndarray) -> np.ndarray:
        """Return ``[problems]``: full rounds of about equal items, or 0 if the loads differ by more than an item."""
        last = self.loads[np.arange(len(self.loads)), self.num_workers - 1]
        is_level = last - self.loads[:, 0] <= costs[self.cursor]
        rounds = (run_ends[self.cursor] - self.cursor) // self.num_workers // 2 * 2
        return np.where(is_level & (rounds >= _MIN_ROUNDS), rounds, 0)

    def deal(self, costs: np.ndarray, rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give each worker one item per round, in alternating direction. Return ``(items, workers)``."""
        counts = rounds * self.num_workers
        problem = np.repeat(np.arange(len(rounds)), counts)
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        width = self.num_workers[problem]
        round_index, column = np.divmod(offset, width)
        column = np.where(round_index % 2, width - 1 - column, column)
        item = self.cursor[problem] + offset
        added = np.bincount(problem * self.loads.shape[1] + column, costs[item], self.loads.size)
        self.loads = self.loads + added.astype(np.int64).reshape(self.loads.shape)
        self.cursor = self.cursor + counts
        return item, self.workers[problem, column]

    def give(self, costs: np.ndarray, problems: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In these problems give the k-th next item to the k-th least loaded worker. Return ``(items, workers)``.

        It stops at the first worker that is no longer the least loaded once the workers before it have their items,
        so the result equals that of a heap, item by item.
        """
        item = self.cursor[:, None] + np.arange(self.loads.shape[1])
        taken = (item < self.end[:, None]) & problems[:, None]
        given = np.where(taken, costs[np.minimum(item, len(costs) - 1)], 0)
        passed = self.loads[:, 1:] > np.minimum.accumulate(self.loads + given, axis=1)[:, :-1]
        taken[:, 1:] &= ~np.logical_or.accumulate(passed, axis=1)
        self.loads = self.loads + np.where(taken, given, 0)
        self.cursor = self.cursor + taken.sum(axis=1)
        return item[taken], self.workers[taken]
