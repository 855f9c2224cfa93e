"""The problem of a step with sections: which samples wait for whom, and how long everything takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Feeder:
    """One data-parallel rank (or group) of a section: it encodes the samples of some lanes, one after the other."""

    # ``[samples]`` seconds of the forward; 0: the sample has nothing that this section encodes
    forward: Sequence[float]
    # ``[samples]`` seconds of the backward; 0: the section is frozen, or the sample needs none
    backward: Sequence[float]
    lanes: tuple[int, ...]  # the lanes that it feeds
    slots: int = 2  # samples of one lane whose features may wait or be on their way
    in_flight: int | None = None  # trained samples whose activations it may keep. None: any number
    # it keeps no activations; each backward repeats the forward, so ``in_flight`` does not matter
    encode_twice: bool = False

    @cached_property
    def backwards(self) -> list[float]:
        """``[samples]`` seconds from the beginning of a sample's backward to its end; 0: it has none."""
        again = self.forward if self.encode_twice else [0.0] * len(self.forward)
        return [b + f if b > 0 else 0.0 for b, f in zip(self.backward, again, strict=True)]

    @cached_property
    def keeps(self) -> int:
        """Number of trained samples whose activations it may keep."""
        return len(self.forward) if self.in_flight is None or self.encode_twice else self.in_flight


@dataclass(frozen=True)
class Sink:
    """A section behind the critical one, with decoders: it computes losses in the order in which forwards end."""

    # ``[samples]`` seconds from the hidden states of a sample to their gradients; 0: it computes no loss of it
    seconds: Sequence[float]
    lanes: tuple[int, ...]  # the lanes that send it hidden states


@dataclass(frozen=True)
class Wavefront:
    """Samples of a step, the lanes that train on them, the feeders that encode for the lanes, and the sinks.

    A lane is one data-parallel rank of the critical section. It runs the forward and the backward of a sample, then the
    next sample; a sample begins when all of its features are there. A feeder begins the next forward as soon as slots
    and ``in_flight`` allow, otherwise the backward that became possible first. With sinks, the backward of a sample,
    two thirds of its work, begins when all sinks are done with it; the lane has run ``extra_forwards`` further forwards
    before, if it has as many samples left.
    """

    work: Sequence[float]  # ``[samples]`` seconds of forward and backward in the critical section
    lane: Sequence[int]  # ``[samples]`` the lane of each sample
    num_lanes: int  # number of lanes
    feeders: tuple[Feeder, ...]  # the feeders; a lane has at most one of each section
    # lanes begin their n-th samples together and wait for the longest (collectives of FSDP or experts in every layer);
    # each lane has the same number of samples
    coupled: bool = False
    sinks: tuple[Sink, ...] = ()  # the sinks; a lane has at most one of each section
    extra_forwards: int = 0

    def __post_init__(self) -> None:
        for feeder in self.feeders:
            if {len(feeder.forward), len(feeder.backward)} != {len(self.work)}:
                raise ValueError(f"a feeder has {len(feeder.forward)} samples; expected {len(self.work)}")
            if feeder.slots < 1 or feeder.keeps < 1:
                raise ValueError(f"slots {feeder.slots}, in_flight {feeder.in_flight}: expected at least 1")
            further = self.extra_forwards if self.sinks else 0
            least = len(feeder.lanes) * (self.coupled + further) + (not self.coupled)
            if any(feeder.backwards) and feeder.keeps < least:
                per_lane = f"{1 + further} per lane" if further else "one per lane"
                raise ValueError(f"in_flight {feeder.in_flight}: expected at least {least}, {per_lane}")
        for sink in self.sinks:
            if len(sink.seconds) != len(self.work):
                raise ValueError(f"a sink has {len(sink.seconds)} samples; expected {len(self.work)}")
        of_lane = Counter(self.lane)
        numbers = {of_lane[lane] for lane in range(self.num_lanes)}
        if self.coupled and len(numbers) > 1:
            raise ValueError(f"coupled lanes have {sorted(numbers)} samples; expected equal numbers")

    @property
    def num_samples(self) -> int:
        """Number of samples of the step."""
        return len(self.work)

    @cached_property
    def needs(self) -> list[list[int]]:
        """``[samples]`` indices of the feeders that encode something of each sample."""
        return self._with_work([(set(feeder.lanes), feeder.forward) for feeder in self.feeders])

    @cached_property
    def fed(self) -> list[set[int]]:
        """For each feeder the samples that it encodes."""
        return [{s for s, needs in enumerate(self.needs) if g in needs} for g in range(len(self.feeders))]

    @cached_property
    def predicted(self) -> list[list[int]]:
        """``[samples]`` indices of the sinks that compute a loss of each sample."""
        return self._with_work([(set(sink.lanes), sink.seconds) for sink in self.sinks])

    def _with_work(self, members: Sequence[tuple[set[int], Sequence[float]]]) -> list[list[int]]:
        """``[samples]`` indices of the members, lanes and seconds each, that have work for each sample."""
        return [
            [index for index, (lanes, seconds) in enumerate(members) if lane in lanes and seconds[s] > 0]
            for s, lane in enumerate(self.lane)
        ]

    @cached_property
    def exposed(self) -> list[float]:
        """``[samples]`` seconds from the end of a forward to its gradients, if no sink is busy then."""
        return [max([self.sinks[n].seconds[s] for n in found], default=0.0) for s, found in enumerate(self.predicted)]

    @cached_property
    def loads(self) -> tuple[list[float], list[float]]:
        """``[samples]`` seconds of forwards, and of backwards: all feeders of a sample together."""
        needs = [[self.feeders[g] for g in feeders] for feeders in self.needs]
        forward = [sum([feeder.forward[s] for feeder in feeders]) for s, feeders in enumerate(needs)]
        return forward, [sum([feeder.backwards[s] for feeder in feeders]) for s, feeders in enumerate(needs)]

    def lanes_of(self, order: Sequence[int]) -> list[list[int]]:
        """Return the samples of each lane, in the order of ``order``."""
        lanes: list[list[int]] = [[] for _ in range(self.num_lanes)]
        for sample in order:
            lanes[self.lane[sample]].append(sample)
        return lanes
