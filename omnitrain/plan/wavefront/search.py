"""Find an order of the samples of a step: a few good ones, then a local search, and bounds that no order can beat."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, permutations, product
from math import factorial, prod
from operator import add
from random import Random

from omnitrain.plan.wavefront.dispatch import dispatched
from omnitrain.plan.wavefront.feeds import Feeder, Sink, Wavefront
from omnitrain.plan.wavefront.simulate import FORWARD, makespan

Lanes = list[list[int]]


def lower_bound(wave: Wavefront) -> float:
    """Return a number of seconds that no order of the samples beats, for the lanes as they are."""
    if not wave.num_samples:
        return 0.0
    lanes = wave.lanes_of(range(wave.num_samples))
    whole = _whole_lanes(wave, lanes)
    found = [*whole, max(_chain(wave, s) for s in range(wave.num_samples))]
    for sink in wave.sinks:
        found += _own_losses(wave, sink, [s for lane in sink.lanes for s in lanes[lane] if sink.seconds[s] > 0])
    for feeder in wave.feeders:
        fed = [s for lane in feeder.lanes for s in lanes[lane] if feeder.forward[s] > 0]
        found += [*_own_work(wave, feeder, fed), *_lanes_in_turn(feeder, lanes, whole)] if fed else []
    return max(found)


def _whole_lanes(wave: Wavefront, lanes: Lanes) -> list[float]:
    """The work of each lane, or of the rounds of coupled lanes, and the losses that no other work of it can hide.

    Without further forwards, a lane waits for the slowest sink of each sample. With one, it runs a backward and a
    forward of two others while a sink computes the loss of a sample. A sink computes one loss after the other, so at
    most the j longest works of the lane run beside the j longest losses of the sink.
    """
    works = [_descending(wave.work, lane) for lane in lanes]
    exposed = [_descending(wave.exposed, lane) for lane in lanes]
    if wave.coupled:  # the j-th longest round is at least as long as the j-th longest sample of any lane
        works, exposed = ([[*map(max, zip(*seconds, strict=True))]] * len(lanes) for seconds in (works, exposed))
    if not wave.extra_forwards:
        return [sum(map(sum, both)) for both in zip(works, exposed, strict=True)]
    hidden = 1 if wave.extra_forwards == 1 else wave.num_samples
    whole = [*map(sum, works)]
    for sink in wave.sinks:
        for lane in sink.lanes:
            losses = zip(_descending(sink.seconds, lanes[lane]), works[lane], strict=True)
            waits = max(accumulate((loss - hidden * work for loss, work in losses), initial=0.0))
            whole[lane] = max(whole[lane], sum(works[lane]) + waits)
    return whole


def _descending(seconds: Sequence[float], samples: Sequence[int]) -> list[float]:
    return sorted([seconds[s] for s in samples], reverse=True)


def _before_and_behind(wave: Wavefront, sample: int) -> tuple[float, float]:
    """The seconds of a sample before and behind its lane: its slowest forward, and its slowest backward."""
    fed_by = [wave.feeders[g] for g in wave.needs[sample]]
    before = max((feeder.forward[sample] for feeder in fed_by), default=0.0)
    return before, max((feeder.backwards[sample] for feeder in fed_by), default=0.0)


def _chain(wave: Wavefront, sample: int) -> float:
    """The seconds of a sample alone."""
    return sum(_before_and_behind(wave, sample), _stay(wave, sample))


def _stay(wave: Wavefront, sample: int) -> float:
    """The least seconds from the beginning of a sample in its lane to its end there."""
    return wave.work[sample] + wave.exposed[sample]


def _own_losses(wave: Wavefront, sink: Sink, predicted: Sequence[int]) -> Iterator[float]:
    """The losses of a sink follow a first forward, and a last backward follows them."""
    if predicted:
        sides = [_before_and_behind(wave, s) for s in predicted]
        heads = [before + FORWARD * wave.work[s] for s, (before, _) in zip(predicted, sides, strict=True)]
        tails = [(1 - FORWARD) * wave.work[s] + behind for s, (_, behind) in zip(predicted, sides, strict=True)]
        yield min(heads) + sum(sink.seconds[s] for s in predicted) + min(tails)


def _own_work(wave: Wavefront, feeder: Feeder, fed: Sequence[int]) -> Iterator[float]:
    """A sample's lane and backward follow its last forward, and precede its first backward."""
    forwards, backwards = sum(feeder.forward[s] for s in fed), sum(feeder.backwards[s] for s in fed)
    yield forwards + min(_stay(wave, s) + feeder.backwards[s] for s in fed)
    trained = [s for s in fed if feeder.backwards[s] > 0]
    if trained:
        first = min(feeder.forward[s] + _stay(wave, s) for s in trained)
        yield max(forwards, first) + backwards
        own = sum(feeder.forward[s] + wave.work[s] + feeder.backwards[s] for s in trained)
        others = sum(_beside(wave, [s for s in trained if wave.lane[s] == lane], lane) for lane in feeder.lanes)
        yield (own + max(others, sum(wave.exposed[s] for s in trained))) / feeder.keeps


def _beside(wave: Wavefront, stay: Sequence[int], lane: int) -> float:
    """The least work of others that a lane runs between forward and backward of some of its samples, added up."""
    works = sorted(work for work, own in zip(wave.work, wave.lane, strict=True) if own == lane)
    further = wave.extra_forwards if wave.sinks else 0
    return further * sum(works[: max(len(stay) - further, 0)])


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


BUDGET = 16_000  # simulated samples; 20 to 45 ms
_LEAST_SIMULATIONS = 5
_NUM_FITTED = 8  # of the seeds for feeders with limits
_PACES = (0.02, 0.06, 0.2)  # of the seeds with sinks
_EXACT = 1 + 1e-9


def best_order(wave: Wavefront, budget: int = BUDGET) -> list[int]:
    """Return an order of all samples of a step that makes it short.

    Seeds come first. If the step has few samples, all orders follow. Otherwise the best order changes step by step
    while it does not become longer. The lower bound ends the search. The result is the same on all ranks and machines:
    the search also ends after ``budget`` simulated samples in all, not after a time.
    """
    bound = lower_bound(wave) * _EXACT
    best, shortest = list(range(wave.num_samples)), float("inf")
    passes = wave.num_samples * (5 if wave.sinks else 1)
    random, most = Random(0), max(budget // max(passes, 1), _LEAST_SIMULATIONS)
    # Only the orders inside of lanes that wait for each other differ.
    apart = wave.lanes_of(best) if wave.coupled else [best]
    few = prod(factorial(len(samples)) for samples in apart) <= most
    others: Iterator[list[int]] = iter(lambda: _neighbour(best, random), None)
    if few:
        others = ([*chain.from_iterable(orders)] for orders in product(*map(permutations, apart)))
    for order in islice(chain(seeds(wave, random), others), None if few else most):
        seconds = makespan(wave, order)
        if seconds <= shortest * _EXACT:
            best, shortest = order, min(seconds, shortest)
        if shortest <= bound:
            break
    return best


def _neighbour(best: list[int], random: Random) -> list[int]:
    """An order in which two samples have changed places, or one has moved."""
    order = best.copy()
    i, j = random.randrange(len(order)), random.randrange(len(order))
    if random.random() < 0.5:
        order[i], order[j] = order[j], order[i]
    else:
        order.insert(j, order.pop(i))
    return order


def seeds(wave: Wavefront, random: Random) -> Iterator[list[int]]:
    """Yield orders that are good in different situations."""
    if wave.sinks:
        yield from (dispatched(wave, random, pace) for pace in _PACES)
        return
    level = _level(wave, [sum(seconds) for seconds in zip(*wave.loads, strict=True)])
    yield by_need(wave, level)
    yield by_need(wave, [lane[::-1] for lane in level])  # text before heavy media, which takes time to encode
    waits = any(feeder.keeps < sum(b > 0 for b in feeder.backwards) for feeder in wave.feeders)
    if waits and not wave.coupled:  # a feeder may have to run a backward before it may run a forward
        yield from (fitted(wave, random) for _ in range(_NUM_FITTED))


def by_need(wave: Wavefront, lanes: Lanes) -> list[int]:
    """Merge the orders of lanes: first the samples that a lane needs first."""
    need = {}
    for lane in lanes:
        time = 0.0
        for sample in lane:
            need[sample] = time
            time += wave.work[sample]
    return sorted((sample for lane in lanes for sample in lane), key=need.__getitem__)


def _level(wave: Wavefront, load: Sequence[float]) -> Lanes:
    """Samples of all lanes so that at any time the feeders have had their share of the load, neither more nor less."""
    lanes = wave.lanes_of(range(wave.num_samples))
    fed, plain = ([[s for s in lane if (load[s] > 0) is has_load] for lane in lanes] for has_load in (True, False))
    orders: Lanes = [[] for _ in lanes]
    upcoming = [(0.0, k) for k, lane in enumerate(lanes) if lane]  # seconds of the samples so far, lane
    surplus, share = 0.0, sum(load) / (sum(wave.work) or 1.0)
    while upcoming:
        seconds, lane = heapq.heappop(upcoming)
        if plain[lane] and (surplus > 0 or not fed[lane] or not orders[lane]):
            sample = plain[lane].pop(0)
        else:
            off = {s: abs(surplus + load[s] - share * wave.work[s]) for s in fed[lane]}
            sample = min(off, key=off.__getitem__)
            fed[lane].remove(sample)
        orders[lane].append(sample)
        surplus += load[sample] - share * wave.work[sample]
        if len(orders[lane]) < len(lanes[lane]):
            heapq.heappush(upcoming, (seconds + wave.work[sample], lane))
    return orders


_NUM_CANDIDATES = 4
_BALANCES = (0.05, 0.1, 0.3)


def fitted(wave: Wavefront, random: Random) -> list[int]:
    """Choose the next sample again and again, for a feeder that keeps as few samples as the strictest one.

    From its forward to its backward, a sample occupies one of the few places. So no place should wait: of a few samples
    that are drawn, choose the one that comes back from its lane when the fewest other samples do. And places must have
    work until the end: a lane with more work left goes before a lane that would be free a little earlier.
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
    """Seconds of an interval that other intervals cover, each counted."""
    seconds = 0.0
    for other, other_end in others:
        if other < end and other_end > start:
            seconds += (end if end < other_end else other_end) - (start if start > other else other)
    return seconds
