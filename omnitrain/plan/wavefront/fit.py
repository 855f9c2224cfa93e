"""Order samples for a feeder that may keep few of them: each is chosen so that it waits for no other one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from random import Random

from omnitrain.plan.wavefront.feeds import Wavefront

_NUM_CANDIDATES = 4
_BALANCES = (0.05, 0.1, 0.3)


def fitted(wave: Wavefront, random: Random) -> list[int]:
    """Choose the next sample again and again, for a feeder that keeps as few samples as the strictest one.

    From its forward to its backward, a sample occupies one of the few places. So no place should wait: of a few samples
    that are drawn, the chosen one comes back from its lane when the fewest others do. And places must have work until
    the end: lanes with more work left go before others that would be free a little earlier.
    """
    forward, backward = wave.loads
    spans = [sum(seconds) for seconds in zip(forward, wave.work, backward, strict=True)]
    rest = [sorted(lane, key=lambda s: -spans[s]) for lane in wave.lanes_of(range(wave.num_samples))]
    left = [sum([spans[s] for s in lane]) for lane in rest]
    places = min(feeder.keeps for feeder in wave.feeders)
    pause = sum(forward) / max(1, sum(f > 0 for f in forward))  # a forward follows each backward
    balance, time, free = random.choice(_BALANCES), 0.0, [0.0] * wave.num_lanes
    order: list[int] = []
    kept: list[tuple[float, int]] = []  # end in the lane, sample
    while len(order) < wave.num_samples:
        if len(kept) == places:
            end, sample = heapq.heappop(kept)
            time = max(time, end) + backward[sample]
            continue
        lane = min([k for k in range(wave.num_lanes) if rest[k]], key=lambda k: max(free[k], time) - balance * left[k])
        busy = [(end, end + backward[s] + pause) for end, s in kept]
        ends = {s: max(free[lane], time + forward[s]) + wave.work[s] for s in _candidates(rest[lane], random)}
        chosen = min(ends, key=lambda s: _overlap(ends[s], ends[s] + backward[s] + pause, busy))
        rest[lane].remove(chosen)
        order.append(chosen)
        time += forward[chosen]
        left[lane] -= spans[chosen]
        free[lane] = ends[chosen]
        if backward[chosen] > 0:
            heapq.heappush(kept, (ends[chosen], chosen))
    return order


def _candidates(samples: Sequence[int], random: Random) -> Sequence[int]:
    """All samples if they are few, else a few that are drawn."""
    if len(samples) <= _NUM_CANDIDATES:
        return samples
    return [samples[i] for i in sorted({int(random.random() * len(samples)) for _ in range(_NUM_CANDIDATES)})]


def _overlap(start: float, end: float, others: Sequence[tuple[float, float]]) -> float:
    """Seconds of an interval that others cover, each counted."""
    seconds = 0.0
    for other, other_end in others:
        if other < end and other_end > start:
            seconds += (end if end < other_end else other_end) - (start if start > other else other)
    return seconds
