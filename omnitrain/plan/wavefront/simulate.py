"""Simulate a step with sections."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from omnitrain.plan.wavefront.feeds import Wavefront

NEVER = float("inf")
FeederAction = tuple[int, bool, float, float]  # sample, whether it is its backward, seconds of its start and end


@dataclass
class Timeline:
    """When everything happens in a step; seconds from its beginning.

    Attributes:
        start: ``[samples]`` when the lane of a sample begins it.
        end: ``[samples]`` when the lane has run its backward.
        feeders: for each feeder its actions, in order.
    """

    start: list[float]
    end: list[float]
    feeders: list[list[FeederAction]]

    @property
    def makespan(self) -> float:
        """When the last lane and the last feeder end."""
        return max([*self.end, *[actions[-1][3] for actions in self.feeders if actions]], default=0.0)


def makespan(wave: Wavefront, order: Sequence[int]) -> float:
    """Return the seconds of a step; see :func:`simulate`."""
    return simulate(wave, order).makespan


def simulate(wave: Wavefront, order: Sequence[int]) -> Timeline:
    """Run a step in one order of its samples.

    Lanes and feeders follow the same order, each with its own samples. So no cycle of waits exists: the first sample in
    the order that no lane has begun can always be encoded.

    This is the inner loop of a search, so it is one function over plain lists.

    Args:
        wave: the step.
        order: ``[samples]`` a permutation of all samples.
    """
    lanes = wave.lanes_of(order)
    if wave.coupled:
        rounds = list(zip(*lanes, strict=True))
        order = [sample for samples in rounds for sample in samples]
        lanes = [[samples[0] for samples in rounds]]  # a round goes by the name of its first sample
        first = {sample: samples[0] for samples in rounds for sample in samples}
    else:
        rounds, first = [], {}
    needs, works, lane_of, num_feeders = wave.needs, list(wave.work), wave.lane, len(wave.feeders)
    waits = [len(feeders) for feeders in needs]  # features of a sample (of a round) that are not there yet
    arrived = [0.0] * wave.num_samples
    for samples in rounds:
        waits[samples[0]] = sum([waits[sample] for sample in samples])
        works[samples[0]] = max([works[sample] for sample in samples])
    start, end = [NEVER] * wave.num_samples, [NEVER] * wave.num_samples
    lane_next, lane_free = [0] * len(lanes), [0.0] * len(lanes)
    feeder_next, feeder_free, kept = [0] * num_feeders, [0.0] * num_feeders, [0] * num_feeders
    ready: list[list[tuple[float, int]]] = [[] for _ in range(num_feeders)]  # backwards that became possible
    actions: list[list[FeederAction]] = [[] for _ in range(num_feeders)]
    forwards, backwards = [feeder.forward for feeder in wave.feeders], [feeder.backwards for feeder in wave.feeders]
    queues, frees = _queues(wave, order)

    def advance(lane: int) -> None:
        """Run the lane as far as its features are there."""
        samples, index, free = lanes[lane], lane_next[lane], lane_free[lane]
        while index < len(samples) and not waits[samples[index]]:
            name = samples[index]
            begin = max(free, arrived[name])
            free = begin + works[name]
            for sample in rounds[index] if rounds else (name,):
                start[sample], end[sample] = begin, free
                for feeder in needs[sample]:
                    if backwards[feeder][sample] > 0:
                        heapq.heappush(ready[feeder], (free, sample))
            index += 1
        lane_next[lane], lane_free[lane] = index, free

    for lane in range(len(lanes)):
        advance(lane)
    while True:
        soonest, which, is_backward = NEVER, -1, False
        for feeder in range(num_feeders):
            free, index = feeder_free[feeder], feeder_next[feeder]
            if index < len(queues[feeder]) and kept[feeder] < wave.feeders[feeder].keeps:
                frees_slot = frees[feeder][index]
                time = free if frees_slot < 0 else max(free, start[frees_slot])
                if time < soonest:
                    soonest, which, is_backward = time, feeder, False
            if ready[feeder]:
                time = max(free, ready[feeder][0][0])
                if time < soonest:
                    soonest, which, is_backward = time, feeder, True
        if which < 0:
            break
        if is_backward:
            sample = heapq.heappop(ready[which])[1]
            done = soonest + backwards[which][sample]
            kept[which] -= 1
        else:
            sample = queues[which][feeder_next[which]]
            done = soonest + forwards[which][sample]
            feeder_next[which] += 1
            kept[which] += backwards[which][sample] > 0
            name = first[sample] if rounds else sample
            waits[name] -= 1
            arrived[name] = max(arrived[name], done)
        feeder_free[which] = done
        actions[which].append((sample, is_backward, soonest, done))
        if not is_backward and not waits[name]:
            advance(0 if rounds else lane_of[sample])
    return Timeline(start, end, actions)


def _queues(wave: Wavefront, order: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """For each feeder its samples in order, and for each of them the sample whose begin frees its slot, or -1."""
    queues: list[list[int]] = [[] for _ in wave.feeders]
    frees: list[list[int]] = [[] for _ in wave.feeders]
    before: list[list[list[int]]] = [[[] for _ in range(wave.num_lanes)] for _ in wave.feeders]
    slots, needs = [feeder.slots for feeder in wave.feeders], wave.needs
    for sample in order:
        for feeder in needs[sample]:
            mine = before[feeder][wave.lane[sample]]
            frees[feeder].append(mine[-slots[feeder]] if len(mine) >= slots[feeder] else -1)
            mine.append(sample)
            queues[feeder].append(sample)
    return queues, frees
