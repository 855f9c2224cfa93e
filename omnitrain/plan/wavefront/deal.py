"""Deal the samples of a step to lanes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(work: Sequence[float], load: Sequence[float], num_lanes: int, *, coupled: bool = False) -> list[int]:
    """Return ``[samples]`` the lane of each sample; numbers of samples per lane differ by one at most.

    ``work`` and ``load`` ``[samples]`` are seconds in the critical section, and in the sections that feed it. Coupled
    lanes run in rounds and wait for the longest sample of a round, so a round gets samples of like length. Otherwise
    loads are balanced first, then work.
    """
    lane = [0] * len(work)
    sums = [(0.0, 0.0)] * num_lanes  # load, work
    longest_first = sorted(range(len(work)), key=lambda s: (-work[s], s))
    if coupled:
        batches = [(longest_first[i : i + num_lanes], 1) for i in range(0, len(work), num_lanes)]
        room = [len(batches)] * num_lanes
    else:
        fed, plain = [s for s in longest_first if load[s] > 0], [s for s in longest_first if load[s] <= 0]
        batches = [(fed, 1), (plain, -1)]
        room = [len(work) // num_lanes + (k < len(work) % num_lanes) for k in range(num_lanes)]
    for batch, direction in batches:  # of the comparison of sums: 1: by load, then work; -1: by work, then load
        free = [(sums[k][::direction], k) for k in range(num_lanes) if room[k]]
        heapq.heapify(free)
        for sample in sorted(batch, key=lambda s: -load[s]):
            _, chosen = heapq.heappop(free)
            lane[sample] = chosen
            room[chosen] -= 1
            sums[chosen] = (sums[chosen][0] + load[sample], sums[chosen][1] + work[sample])
            if room[chosen] and not coupled:  # a round has one sample of each lane
                heapq.heappush(free, (sums[chosen][::direction], chosen))
    return lane
