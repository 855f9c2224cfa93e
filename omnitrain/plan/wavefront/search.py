"""Find an order of the samples of a step: a few good ones to begin with, then a local search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, islice, permutations, product
from math import factorial, prod
from random import Random

from omnitrain.plan.wavefront.bounds import lower_bound
from omnitrain.plan.wavefront.feeds import Wavefront
from omnitrain.plan.wavefront.fit import Loads, fitted, is_limited
from omnitrain.plan.wavefront.simulate import makespan

Lanes = list[list[int]]
BUDGET = 16_000  # simulated samples; 20 to 45 ms
_NUM_SEEDS = 5
_NUM_FITTED = 8  # of the seeds for feeders with limits
_EXACT = 1 + 1e-9


def best_order(wave: Wavefront, budget: int = BUDGET) -> list[int]:
    """Return an order of all samples of a step that makes it short.

    Seeds come first. Then, of a step with few samples, come all orders; of others, the best one changes step by step
    while it does not become longer. The lower bound ends the search. The result is the same on all ranks and machines:
    the search also ends after a number of simulated samples, not after a time.

    Args:
        wave: the step.
        budget: number of samples to simulate in all.
    """
    bound = lower_bound(wave) * _EXACT
    best, shortest = list(range(wave.num_samples)), float("inf")
    random, most = Random(0), max(budget // max(wave.num_samples, 1), _NUM_SEEDS)
    # Only the orders inside of lanes that wait for each other differ.
    apart = wave.lanes_of(best) if wave.coupled else [best]
    few = prod(factorial(len(samples)) for samples in apart) <= most
    others = _all_orders(apart) if few else iter(lambda: _neighbour(best, random), None)
    for order in islice(chain(seeds(wave, random), others), None if few else most):
        seconds = makespan(wave, order)
        if seconds <= shortest * _EXACT:
            best, shortest = order, min(seconds, shortest)
        if shortest <= bound:
            break
    return best


def _all_orders(apart: Lanes) -> Iterator[list[int]]:
    """Every order of the samples of each list, list after list."""
    return ([*chain.from_iterable(orders)] for orders in product(*map(permutations, apart)))


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
    loads = Loads.of(wave)
    load = [forward + backward for forward, backward in zip(loads.forward, loads.backward, strict=True)]
    lanes = wave.lanes_of(range(wave.num_samples))
    level = _level(wave, lanes, load)
    yield by_need(wave, level)
    yield by_need(wave, [lane[::-1] for lane in level])  # text before heavy media, which takes time to encode
    yield by_need(wave, [_spread(lane, load, ascending=False) for lane in lanes])
    yield by_need(wave, [_spread(lane, load, ascending=True) for lane in lanes])
    yield by_need(wave, [_light_at_both_ends(wave, lane, load) for lane in lanes])
    if is_limited(wave) and not wave.coupled:
        yield from (fitted(wave, loads, random) for _ in range(_NUM_FITTED))


def by_need(wave: Wavefront, lanes: Lanes) -> list[int]:
    """Merge the orders of lanes: first the samples that a lane needs first."""
    need = {}
    for lane in lanes:
        time = 0.0
        for sample in lane:
            need[sample] = time
            time += wave.work[sample]
    return sorted((sample for lane in lanes for sample in lane), key=need.__getitem__)


def _level(wave: Wavefront, lanes: Lanes, load: Sequence[float]) -> Lanes:
    """Samples of all lanes so that at any time the feeders have had their share of the load, neither more nor less."""
    fed = [[s for s in lane if load[s] > 0] for lane in lanes]
    plain = [[s for s in lane if load[s] <= 0] for lane in lanes]
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
        if fed[lane] or plain[lane]:
            heapq.heappush(upcoming, (seconds + wave.work[sample], lane))
    return orders


def _spread(lane: list[int], load: Sequence[float], *, ascending: bool) -> list[int]:
    """Samples with media evenly between those without; heavy and light in turn, or ascending."""
    fed = sorted((s for s in lane if load[s] > 0), key=load.__getitem__)
    plain = iter([s for s in lane if load[s] <= 0])
    if not ascending:
        fed = [fed[-1 - i // 2] if i % 2 == 0 else fed[i // 2] for i in range(len(fed))]
    first = 1 if len(lane) > len(fed) + 1 else 0
    room = len(lane) - 2 * first
    places = {first + int((i + 0.5) * room / len(fed)): sample for i, sample in enumerate(fed)}
    return [places[place] if place in places else next(plain) for place in range(len(lane))]


def _light_at_both_ends(wave: Wavefront, lane: list[int], load: Sequence[float]) -> list[int]:
    """The heaviest in the middle: no work of the lane hides the first forward and the last backward."""
    lightest_first = sorted(lane, key=load.__getitem__)
    if not any(wave.feeders[g].backwards[s] > 0 for s in lane for g in wave.needs[s]):
        return lightest_first
    return lightest_first[1::2] + lightest_first[::2][::-1]
