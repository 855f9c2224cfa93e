"""Order the samples of a step with sinks: a lane that becomes free gets the sample that delays it least."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from omnitrain.plan.wavefront.feeds import Wavefront
from omnitrain.plan.wavefront.simulate import FORWARD

_NUM_CANDIDATES = 8


class _Dispatch(NamedTuple):
    """A forward of a lane, and the backward that follows it."""

    cost: float  # seconds that the lane waits, less the part of a loss that no order can hide
    sample: int  # index of the sample whose forward runs
    free: float  # when the lane can run the next forward
    returned: float  # when the sample's losses are there


def dispatched(wave: Wavefront, random: Random, pace: float) -> list[int]:
    """Return an order in which lanes wait little, for features and for losses.

    Args:
        wave: the step.
        random: draws the candidates of a lane.
        pace: cost of one second by which feeders or sinks get ahead of or behind the lanes, in seconds of waiting.
    """
    lanes = _Lanes(wave, pace)
    rest = wave.lanes_of(range(wave.num_samples))
    free = [(0.0, lane) for lane, samples in enumerate(rest) if samples]
    order: list[int] = []
    while free:
        time, lane = heapq.heappop(free)
        samples = rest[lane]
        candidates = samples if len(samples) <= _NUM_CANDIDATES else random.sample(samples, _NUM_CANDIDATES)
        chosen = lanes.run_best(time, lane, candidates)
        samples.remove(chosen.sample)
        order.append(chosen.sample)
        if samples:
            heapq.heappush(free, (chosen.free, lane))
    return order


class _Lanes:
    """What lanes, feeders and sinks have done so far."""

    def __init__(self, wave: Wavefront, pace: float) -> None:
        self._wave, self._pace = wave, pace
        work = sum(wave.work)
        self._hidden = wave.extra_forwards * work / wave.num_samples  # seconds of a loss, on average
        self._encoded = [0.0] * len(wave.feeders)  # the seconds of the samples that each feeder has had
        self._computed = [0.0] * len(wave.sinks)  # when each sink is free
        # of each lane: samples whose backward has not come, and when their losses are there
        self._open: list[deque[tuple[int, float]]] = [deque() for _ in range(wave.num_lanes)]
        loads = [sum(both) for both in zip(*wave.loads, strict=True)]
        # of each sample: seconds of losses, and of feeders, beyond the share of its work in all work; the sums so far
        self._losses, self._loads = (
            [own - sum(seconds) / work * mine for own, mine in zip(seconds, wave.work, strict=True)]
            for seconds in (wave.exposed, loads)
        )
        self._ahead, self._fed_ahead = [0.0] * wave.num_lanes, 0.0

    def run_best(self, time: float, lane: int, candidates: Sequence[int]) -> _Dispatch:
        """Run the sample that costs least in a lane that is free at ``time``."""
        chosen = min([self._turn(time, lane, sample) for sample in candidates])
        sample, wave = chosen.sample, self._wave
        for g in wave.needs[sample]:
            self._encoded[g] += wave.feeders[g].forward[sample] + wave.feeders[g].backwards[sample]
        for n in wave.predicted[sample]:
            self._computed[n] = chosen.returned
        self._open[lane].append((sample, chosen.returned))
        if len(self._open[lane]) > wave.extra_forwards:
            self._open[lane].popleft()
        self._ahead[lane] += self._losses[sample]
        self._fed_ahead += self._loads[sample]
        return chosen

    def _turn(self, time: float, lane: int, sample: int) -> _Dispatch:
        wave, start = self._wave, time
        for g in wave.needs[sample]:
            if (fed := self._encoded[g] + wave.feeders[g].forward[sample]) > start:
                start = fed
        free = returned = turn = start + FORWARD * wave.work[sample]
        for n in wave.predicted[sample]:
            end = (turn if turn > self._computed[n] else self._computed[n]) + wave.sinks[n].seconds[sample]
            returned = end if end > returned else returned
        lost, is_open = start - time, self._open[lane]
        if len(is_open) == wave.extra_forwards:
            back, there = is_open[0] if is_open else (sample, returned)
            begin = there if there > turn else turn
            lost += begin - turn
            free = begin + (1 - FORWARD) * wave.work[back]
        if (waits := returned - free - FORWARD * self._hidden) > 0:
            lost += waits
        if (exposed := wave.exposed[sample] - self._hidden) > 0:
            lost -= exposed
        off = abs(self._ahead[lane] + self._losses[sample]) + abs(self._fed_ahead + self._loads[sample])
        return _Dispatch(lost + self._pace * off, sample, free, returned)
