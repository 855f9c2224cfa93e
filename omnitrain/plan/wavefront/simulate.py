"""Simulate a step with sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from omnitrain.plan.wavefront.feeds import Feeder, Wavefront

NEVER = float("inf")
FeederAction = tuple[int, bool, float, float]  # sample, whether it is its backward, seconds of its start and end


@dataclass
class WavefrontTimeline:
    """When everything happens in a step, in seconds: samples in their lanes, and the actions of each feeder."""

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


def simulate(wave: Wavefront, order: Sequence[int]) -> WavefrontTimeline:
    """Run a step in one order of its samples, ``[samples]`` a permutation of them.

    Lanes and feeders follow the same order, each with its own samples. So no cycle of waits exists: the first sample in
    the order that no lane has begun can always be encoded. This is the inner loop of a search: after each action of a
    feeder it looks only at the feeders whose next action can be another one now.
    """
    lanes = _RunningLanes(wave, order)
    for lane in range(len(lanes.rounds)):
        lanes.advance(lane)
    feeders, changed = lanes.feeders, lanes.changed
    begins = [*(feeder.next_begin() for feeder in feeders), NEVER]
    while (soonest := min(begins)) < NEVER:
        number = begins.index(soonest)
        feeder = feeders[number]
        if feeder.is_backward_next:
            feeder.run_backward(soonest)
        else:
            lanes.receive(feeder.run_forward(soonest), feeder.free)
        changed.add(number)
        for number in changed:
            begins[number] = feeders[number].next_begin()
        changed.clear()
    return WavefrontTimeline(lanes.start, lanes.end, [feeder.actions for feeder in feeders])


class _RunningFeeder:
    """A feeder during a step; ``free``: when its last action ends; ``ready``: a heap of the possible backwards."""

    def __init__(self, feeder: Feeder, queue: list[int], lane: Sequence[int], start: list[float]) -> None:
        self.forward, self.backwards, self.keeps = feeder.forward, feeder.backwards, feeder.keeps
        self.queue, self.start = queue, start  # its samples in order; when lanes begin samples
        self.frees: list[int] = []  # for each of its samples the one whose begin frees its slot, or -1
        before: dict[int, list[int]] = {number: [] for number in feeder.lanes}
        for sample in queue:
            of_lane = before[lane[sample]]
            self.frees.append(of_lane[-feeder.slots] if len(of_lane) >= feeder.slots else -1)
            of_lane.append(sample)
        self.ready: list[tuple[float, int]] = []
        self.actions: list[FeederAction] = []
        self.is_backward_next, self.free = False, 0.0
        self.encoded, self.kept = 0, 0  # samples of the queue; samples whose activations it keeps

    def next_begin(self) -> float:
        """Return when its next action can begin: a forward if its limits allow one, unless a backward begins sooner."""
        free, index = self.free, self.encoded
        begin, self.is_backward_next = NEVER, False
        if index < len(self.queue) and self.kept < self.keeps:
            frees_slot = self.frees[index]
            freed = 0.0 if frees_slot < 0 else self.start[frees_slot]
            begin = free if free > freed else freed
        if self.ready:
            possible = self.ready[0][0]
            if free < begin and possible < begin:
                begin, self.is_backward_next = free if free > possible else possible, True
        return begin

    def run_forward(self, begin: float) -> int:
        """Encode the next sample, and return it."""
        sample = self.queue[self.encoded]
        self.encoded += 1
        self.kept += self.backwards[sample] > 0
        self.free = begin + self.forward[sample]
        self.actions.append((sample, False, begin, self.free))
        return sample

    def run_backward(self, begin: float) -> None:
        """Run the backward that became possible first."""
        sample = heappop(self.ready)[1]
        self.kept -= 1
        self.free = begin + self.backwards[sample]
        self.actions.append((sample, True, begin, self.free))


class _RunningLanes:
    """The lanes during a step, and the feeders; coupled lanes are one lane.

    ``rounds`` has for each lane the samples that begin together: one, or one of each coupled lane; the first one names
    the round. ``changed`` has the feeders whose next action a lane may have changed.
    """

    def __init__(self, wave: Wavefront, order: Sequence[int]) -> None:
        lanes = wave.lanes_of(order)
        self.needs, self.lane, self.work = wave.needs, wave.lane, list(wave.work)
        self.rounds: list[list[tuple[int, ...]]] = [list(zip(samples, strict=True)) for samples in lanes]
        self.round_of = list(range(wave.num_samples))
        self.waits = list(map(len, wave.needs))  # features of a round that are not there yet
        self.arrived = [0.0] * wave.num_samples  # when the last feature of a round came
        if wave.coupled:
            self._couple(list(zip(*lanes, strict=True)))
            order = list(chain.from_iterable(self.rounds[0]))
        self.run, self.free = [0] * len(self.rounds), [0.0] * len(self.rounds)  # rounds that a lane has run; its end
        self.start, self.end = [NEVER] * wave.num_samples, [NEVER] * wave.num_samples
        queues = [[sample for sample in order if sample in fed] for fed in wave.fed]
        self.feeders = [
            _RunningFeeder(feeder, queue, wave.lane, self.start)
            for feeder, queue in zip(wave.feeders, queues, strict=True)
        ]
        self.changed: set[int] = set()

    def _couple(self, rounds: list[tuple[int, ...]]) -> None:
        self.rounds, self.lane = [rounds], [0] * len(self.waits)
        for samples in rounds:
            name = samples[0]
            self.waits[name] = sum([self.waits[sample] for sample in samples])
            self.work[name] = max([self.work[sample] for sample in samples])
            for sample in samples:
                self.round_of[sample] = name

    def receive(self, sample: int, time: float) -> None:
        """Take a sample's features of one feeder at ``time``, and run the lane on if it waited only for them."""
        name = self.round_of[sample]
        self.waits[name] -= 1
        if time > self.arrived[name]:
            self.arrived[name] = time
        if not self.waits[name]:
            self.advance(self.lane[name])

    def advance(self, lane: int) -> None:
        """Run the lane as far as its features are there."""
        rounds, index, free = self.rounds[lane], self.run[lane], self.free[lane]
        while index < len(rounds) and not self.waits[rounds[index][0]]:
            samples = rounds[index]
            begin = max(free, self.arrived[samples[0]])
            free = begin + self.work[samples[0]]
            for sample in samples:
                self.start[sample], self.end[sample] = begin, free
                for number in self.needs[sample]:
                    feeder = self.feeders[number]
                    if feeder.backwards[sample] > 0:
                        heappush(feeder.ready, (free, sample))
                    self.changed.add(number)
            index += 1
        self.run[lane], self.free[lane] = index, free
