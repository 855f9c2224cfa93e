"""Lower bounds of the seconds of a step with sections, which no order of samples can beat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add

from omnitrain.plan.wavefront.feeds import Feeder, Wavefront


def lower_bound(wave: Wavefront) -> float:
    """Return a number of seconds that no order of the samples beats, for the lanes as they are."""
    if not wave.num_samples:
        return 0.0
    lanes = wave.lanes_of(range(wave.num_samples))
    whole = [sum(wave.work[s] for s in lane) for lane in lanes]
    if wave.coupled:
        # The j-th longest round is at least as long as the j-th longest sample of any lane.
        descending = [sorted((wave.work[s] for s in lane), reverse=True) for lane in lanes]
        whole = [sum(max(of_rank) for of_rank in zip(*descending, strict=True))] * len(lanes)
    found = [*whole, max(_chain(wave, s) for s in range(wave.num_samples))]
    for feeder in wave.feeders:
        fed = [s for lane in feeder.lanes for s in lanes[lane] if feeder.forward[s] > 0]
        found += [*_own_work(wave, feeder, fed), *_lanes_in_turn(feeder, lanes, whole)] if fed else []
    return max(found)


def _chain(wave: Wavefront, sample: int) -> float:
    """The seconds of a sample alone: its slowest forward, its lane, its slowest backward."""
    fed_by = [wave.feeders[g] for g in wave.needs[sample]]
    before = max((feeder.forward[sample] for feeder in fed_by), default=0.0)
    return before + wave.work[sample] + max((feeder.backwards[sample] for feeder in fed_by), default=0.0)


def _own_work(wave: Wavefront, feeder: Feeder, fed: Sequence[int]) -> Iterator[float]:
    """A sample's lane and backward follow its last forward, and precede its first backward."""
    forwards, backwards = sum(feeder.forward[s] for s in fed), sum(feeder.backwards[s] for s in fed)
    yield forwards + min(wave.work[s] + feeder.backwards[s] for s in fed)
    trained = [s for s in fed if feeder.backwards[s] > 0]
    if trained:
        first = min(feeder.forward[s] + wave.work[s] for s in trained)
        yield max(forwards, first) + backwards
        yield sum(feeder.forward[s] + wave.work[s] + feeder.backwards[s] for s in trained) / feeder.keeps


def _lanes_in_turn(feeder: Feeder, lanes: Sequence[Sequence[int]], whole: Sequence[float]) -> Iterator[float]:
    """Its lanes begin one after the other, and end one after the other."""
    with_work = [lane for lane in feeder.lanes if lanes[lane]]
    heads = [min(feeder.forward[s] for s in lanes[lane]) for lane in with_work]
    tails = [min(feeder.backwards[s] for s in lanes[lane]) for lane in with_work]
    loads = [whole[lane] for lane in with_work]
    begins, ends = list(accumulate(sorted(heads))), list(accumulate(sorted(tails)))
    yield _last_of(begins, map(add, loads, tails))
    yield _last_of(ends, map(add, loads, heads))
    yield (sum(begins) + sum(loads) + sum(ends)) / len(loads)


def _last_of(begins: Sequence[float], seconds: Iterable[float]) -> float:
    """When the last lane is done at the earliest: the longest one begins first."""
    return max(map(add, begins, sorted(seconds, reverse=True)))
