"""Simulate a step with sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from omnitrain.plan.wavefront.feeds import Feeder, Sink, Wavefront

NEVER = float("inf")
FORWARD = 1 / 3  # of the work of a sample in its lane
FeederAction = tuple[int, bool, float, float]  # sample, whether it is its backward, seconds of its start and end
SinkAction = tuple[int, float, float]  # sample, seconds of its start and end


@dataclass
class WavefrontTimeline:
    """When everything happens in a step, in seconds: samples in their lanes, the actions of each feeder and sink.

    With sinks, ``turn`` has the end of each sample's forward, and ``back`` the beginning of its backward.
    """

    start: list[float]
    end: list[float]
    feeders: list[list[FeederAction]]
    turn: list[float]
    back: list[float]
    sinks: list[list[SinkAction]]

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
    feeder or a sink it looks only at those whose next action can be another one now.
    """
    lanes = _RunningLanes(wave, order)
    for lane in range(len(lanes.passes)):
        lanes.advance(lane)
    feeders, changed = lanes.feeders, lanes.changed
    servers: list[_RunningFeeder | _RunningSink] = [*feeders, *lanes.sinks]
    begins = [*(server.next_begin() for server in servers), NEVER]
    while (soonest := min(begins)) < NEVER:
        number = begins.index(soonest)
        if number >= len(feeders):
            sink = lanes.sinks[number - len(feeders)]
            lanes.take_loss(sink.run(soonest), sink.free)
        elif (feeder := feeders[number]).is_backward_next:
            feeder.run_backward(soonest)
        else:
            lanes.receive(feeder.run_forward(soonest), feeder.free)
        changed.add(number)
        for number in changed:
            begins[number] = servers[number].next_begin()
        changed.clear()
    of_sinks = [sink.actions for sink in lanes.sinks]
    return WavefrontTimeline(lanes.start, lanes.end, [f.actions for f in feeders], lanes.turn, lanes.back, of_sinks)


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


class _RunningSink:
    """A sink during a step; ``ready``: a heap of the samples whose forwards have ended."""

    def __init__(self, sink: Sink) -> None:
        self.seconds, self.free = sink.seconds, 0.0
        self.ready: list[tuple[float, int]] = []
        self.actions: list[SinkAction] = []

    def next_begin(self) -> float:
        """Return when its next loss can begin."""
        return max(self.free, self.ready[0][0]) if self.ready else NEVER

    def run(self, begin: float) -> int:
        """Compute the loss of the sample that came first, and return it."""
        sample = heappop(self.ready)[1]
        self.free = begin + self.seconds[sample]
        self.actions.append((sample, begin, self.free))
        return sample


class _LanePass(NamedTuple):
    """What a lane runs at a time: samples that begin together, or end together."""

    samples: tuple[int, ...]
    seconds: float
    begins: bool  # it needs their features
    ends: bool  # with sinks, it needs the gradients of their hidden states


class _RunningLanes:
    """The lanes during a step, the feeders and the sinks; coupled lanes are one lane.

    ``passes`` has what each lane runs, in order, for one sample, or for one of each coupled lane; the first one names
    the round. ``changed`` has the servers (feeders, then sinks) whose next action a lane may have changed.
    """

    def __init__(self, wave: Wavefront, order: Sequence[int]) -> None:
        lanes = wave.lanes_of(order)
        self.needs, self.predicted, self.lane, self.work = wave.needs, wave.predicted, wave.lane, list(wave.work)
        rounds: list[list[tuple[int, ...]]] = [list(zip(samples, strict=True)) for samples in lanes]
        self.round_of = list(range(wave.num_samples))
        self.waits = list(map(len, wave.needs))  # features of a round that are not there yet
        self.left = list(map(len, wave.predicted))  # losses of a round that are not there yet
        self.arrived = [0.0] * wave.num_samples  # when the last feature of a round came
        self.returned = [0.0] * wave.num_samples  # when its last loss came
        if wave.coupled:
            rounds = [list(zip(*lanes, strict=True))]
            self._couple(rounds[0])
            order = list(chain.from_iterable(rounds[0]))
        self.passes = [[*self._passes(of_lane, wave)] for of_lane in rounds]
        self.run, self.free = [0] * len(rounds), [0.0] * len(rounds)  # passes that a lane has run; its end
        self.start, self.end = [NEVER] * wave.num_samples, [NEVER] * wave.num_samples
        self.turn, self.back = [0.0] * wave.num_samples, [0.0] * wave.num_samples
        queues = [[sample for sample in order if sample in fed] for fed in wave.fed]
        self.feeders = [
            _RunningFeeder(feeder, queue, wave.lane, self.start)
            for feeder, queue in zip(wave.feeders, queues, strict=True)
        ]
        self.sinks = [*map(_RunningSink, wave.sinks)]
        self.changed: set[int] = set()

    def _couple(self, rounds: list[tuple[int, ...]]) -> None:
        self.lane = [0] * len(self.waits)
        for samples in rounds:
            name = samples[0]
            self.waits[name] = sum([self.waits[sample] for sample in samples])
            self.left[name] = sum([self.left[sample] for sample in samples])
            self.work[name] = max([self.work[sample] for sample in samples])
            for sample in samples:
                self.round_of[sample] = name

    def _passes(self, rounds: Sequence[tuple[int, ...]], wave: Wavefront) -> Iterator[_LanePass]:
        """Yield what a lane runs: forward and backward as one pass; with sinks, one after the other."""
        if not wave.sinks:
            yield from (_LanePass(samples, self.work[samples[0]], True, True) for samples in rounds)
            return
        for index in range(len(rounds) + wave.extra_forwards):
            if index < len(rounds):
                yield _LanePass(rounds[index], FORWARD * self.work[rounds[index][0]], True, False)
            if (ended := index - wave.extra_forwards) >= 0:
                yield _LanePass(rounds[ended], (1 - FORWARD) * self.work[rounds[ended][0]], False, True)

    def receive(self, sample: int, time: float) -> None:
        """Take a sample's features of one feeder at ``time``, and run the lane on if it waited only for them."""
        self._take(self.round_of[sample], time, self.waits, self.arrived)

    def take_loss(self, sample: int, time: float) -> None:
        """Take the gradients of a sample's hidden states from one sink, and run the lane on if it waited for them."""
        self._take(self.round_of[sample], time, self.left, self.returned)

    def _take(self, name: int, time: float, missing: list[int], last: list[float]) -> None:
        missing[name] -= 1
        if time > last[name]:
            last[name] = time
        if not missing[name]:
            self.advance(self.lane[name])

    def advance(self, lane: int) -> None:
        """Run the lane as far as its features and losses are there."""
        passes, index, free = self.passes[lane], self.run[lane], self.free[lane]
        while index < len(passes):
            samples, seconds, begins, ends = passes[index]
            name = samples[0]
            if (begins and self.waits[name]) or (ends and self.left[name]):
                break
            begin = max(free, self.arrived[name] if begins else self.returned[name])
            free = begin + seconds
            for sample in samples:
                if begins:
                    self.start[sample] = begin
                if ends:
                    self.end[sample] = free
                    if not begins:
                        self.back[sample] = begin
                else:
                    self.turn[sample] = free
                    for number in self.predicted[sample]:
                        heappush(self.sinks[number].ready, (free, sample))
                        self.changed.add(len(self.feeders) + number)
                for number in self.needs[sample]:
                    feeder = self.feeders[number]
                    if ends and feeder.backwards[sample] > 0:
                        heappush(feeder.ready, (free, sample))
                    self.changed.add(number)
            index += 1
        self.run[lane], self.free[lane] = index, free
