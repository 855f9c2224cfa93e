"""The order of a step's samples with a section that feeds lanes, simulated: how close to the best order it comes.

A step has ``n`` samples on 1 to 4 lanes and one feeder. Mixtures: one sample in ten has media, one in three, half, all,
video (few samples are very heavy), a teacher (every sample, by its length), and a teacher with media. The feeder is
frozen or trained, its load is 0.3 to 0.95 of the lanes', each lane has 2 to 8 slots, and the feeder keeps the
activations of 4, 8 or any number of samples. Two-sided steps also have a sink, such as a decoder, with 0.2 to 0.9 of
the lanes' load in half of the samples; a lane runs one further forward before its first backward, or none. With
``n = 8`` the reference is the best of all orders, otherwise the lower bound. The published rule (Algorithm 1 of
Maestro, arXiv 2605.10501, as it must be meant: samples by their forwards, each where it makes its own lane shortest,
the lanes' orders merged in turn) runs under the same limits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from random import Random
from statistics import fmean, median

from harness import Result, report, start

from omnitrain.plan.wavefront.feeds import Feeder, Sink, Wavefront
from omnitrain.plan.wavefront.search import best_order, lower_bound
from omnitrain.plan.wavefront.simulate import makespan

FORMULA = "seconds of a step in our order / the least (n = 8: of all orders; otherwise the lower bound)"
MIXTURES = ("tenth", "third", "half", "all", "video", "teacher", "teacher_and_media")
SHARES = {"tenth": 0.1, "third": 1 / 3, "half": 0.5, "all": 1.0, "teacher_and_media": 1 / 3}
LOADS, LIMITS = (0.3, 0.6, 0.8, 0.95), ((2, 4), (4, 8), (8, None))
_EVERY = 4  # two-sided steps of 8 samples whose orders are all simulated, which takes seconds for each
LANES = {8: (1, 2, 4), 64: (1, 2, 4), 256: (4,)}


def step_of(random: Random, num_samples: int, num_lanes: int, mixture: str, load: float, *, trained: bool) -> Wavefront:
    """Return a step without limits, its samples dealt to lanes in turn."""
    lengths = [random.lognormvariate(0, 0.4) for _ in range(num_samples)]
    if mixture == "video":
        classes = [random.random() for _ in lengths]
        media = [
            0.0 if u < 0.6 else random.lognormvariate(0, 0.4) if u < 0.9 else random.lognormvariate(2, 0.5)
            for u in classes
        ]
    else:
        number = max(1, round(SHARES.get(mixture, 0) * num_samples)) if mixture in SHARES else 0
        media = [random.lognormvariate(0, 0.5) for _ in range(number)] + [0.0] * (num_samples - number)
        random.shuffle(media)
    of_teacher = lengths if mixture.startswith("teacher") else [0.0] * num_samples
    if not any(media) and mixture == "video":
        media[0] = 5.0
    forward = [a + b for a, b in zip(media, of_teacher, strict=True)]
    backward = [2 * a if trained else 0.0 for a in media]
    work = [3 * length for length in lengths]
    scale = load * sum(work) / num_lanes / (sum(forward) + sum(backward))
    feeder = Feeder([scale * x for x in forward], [scale * x for x in backward], tuple(range(num_lanes)))
    return Wavefront(work, [s % num_lanes for s in range(num_samples)], num_lanes, (feeder,))


def steps(seed: int, num_samples: int, number: int) -> list[Wavefront]:
    """Return steps that differ in everything; every mixture comes equally often."""
    random = Random(f"{seed} {num_samples}")
    rows = list(product(LANES[num_samples], LOADS, LIMITS, (False, True)))
    found = []
    for index in range(number):
        lanes, load, (slots, in_flight), trained = random.choice(rows)
        mixture = MIXTURES[index % len(MIXTURES)]
        wave = step_of(random, num_samples, lanes, mixture, load, trained=trained and mixture != "teacher")
        old = wave.feeders[0]
        feeder = Feeder(old.forward, old.backward, old.lanes, slots, in_flight)
        found.append(Wavefront(wave.work, wave.lane, lanes, (feeder,)))
    return found


def two_sided(seed: int, waves: list[Wavefront]) -> list[Wavefront]:
    """Return the steps, each with a sink; feeders may keep as many samples as extra forwards of their lanes need."""
    random, found = Random(f"{seed} sinks"), []
    for wave in waves:
        lanes, extra = tuple(range(wave.num_lanes)), random.randint(0, 1)
        drawn = [random.lognormvariate(0, 0.5) * (random.random() < 0.5) for _ in wave.work]
        scale = random.choice((0.2, 0.5, 0.9)) * sum(wave.work) / wave.num_lanes / (sum(drawn) or 1.0)
        keeps = [feeder.in_flight and feeder.in_flight + extra * wave.num_lanes for feeder in wave.feeders]
        feeders = tuple(replace(f, in_flight=kept) for f, kept in zip(wave.feeders, keeps, strict=True))
        sink = Sink([scale * seconds for seconds in drawn], lanes)
        found.append(replace(wave, feeders=feeders, sinks=(sink,), extra_forwards=extra))
    return found


def published_order(wave: Wavefront) -> list[int]:
    """Return the order of the published rule."""
    feeder = wave.feeders[0]
    lanes = []
    for lane in wave.lanes_of(range(wave.num_samples)):
        order: list[int] = []
        for sample in sorted(lane, key=lambda s: feeder.forward[s]):
            places = range(len(order) + 1)
            order.insert(min(places, key=lambda p: alone(wave, [*order[:p], sample, *order[p:]])), sample)
        lanes.append(order)
    turns = range(max(map(len, lanes)))
    return [lane[turn] for turn in turns for lane in lanes if turn < len(lane)]


def alone(wave: Wavefront, order: list[int]) -> float:
    """Return the seconds of one lane that has the feeder for itself, without limits."""
    feeder, encoded, free = wave.feeders[0], 0.0, 0.0
    returned = sum(feeder.forward[s] for s in order)
    for sample in order:
        if feeder.forward[sample] > 0:
            encoded += feeder.forward[sample]
            free = max(free, encoded)
        free += wave.work[sample]
        if feeder.backwards[sample] > 0:
            returned = max(returned, free) + feeder.backwards[sample]
    return max(free, returned)


def least(wave: Wavefront) -> float:
    """Return the seconds of the best of all orders; of a large step, the lower bound."""
    bound = lower_bound(wave)
    if wave.num_samples > 8:
        return bound
    shortest = float("inf")
    for order in permutations(range(wave.num_samples)):
        shortest = min(shortest, makespan(wave, order))
        if shortest <= bound * (1 + 1e-9):
            break
    return shortest


def seconds_of_search(wave: Wavefront) -> float:
    """Return how long our search occupies its core, median of 7: other programs on this machine do not count."""
    found = []
    for _ in range(7):
        began = time.process_time()
        best_order(wave)
        found.append(time.process_time() - began)
    return median(found)


def main() -> None:
    """See the top of this file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one set of steps for each")
    options.add_argument("--small", type=int, default=90, help="steps of 8 samples of each seed")
    options.add_argument("--large", type=int, default=54, help="steps of 64, and as many of 256, of each seed")
    options.add_argument("--json", type=Path, help="also write the result to this file")
    given = start(options)
    figures: dict[str, float] = {}
    slowest = 0.0
    for seed in given.seeds:
        sizes = {"8": steps(seed, 8, given.small)}
        sizes["64_and_256"] = [*steps(seed, 64, given.large), *steps(seed, 256, given.large)]
        for size, waves in sizes.items():
            ours, theirs = [], []
            for wave in waves:
                reference = least(wave)
                ours.append(makespan(wave, best_order(wave)) / reference)
                theirs.append(makespan(wave, published_order(wave)) / reference)
            near = 1.01 if size == "8" else 1.02
            for name, ratios in (("ours", ours), ("published", theirs)):
                key = f"seed{seed}_{size}_{name}"
                figures |= {f"{key}_mean": fmean(ratios), f"{key}_worst": max(ratios), f"{key}_best": min(ratios)}
                figures[f"{key}_within_{near}"] = fmean(ratio <= near for ratio in ratios)
        two = {size: two_sided(seed, waves) for size, waves in sizes.items()}
        for size, waves in {"8": two["8"][::_EVERY], "64_and_256": two["64_and_256"]}.items():
            ratios = [makespan(wave, best_order(wave)) / least(wave) for wave in waves]
            key = f"seed{seed}_{size}_two_sided"
            figures |= {f"{key}_mean": fmean(ratios), f"{key}_worst": max(ratios), f"{key}_best": min(ratios)}
        if given.large:
            of_256 = [*sizes["64_and_256"][given.large :], *two["64_and_256"][given.large :]]
            slowest = max(slowest, *map(seconds_of_search, of_256))
    figures["milliseconds_of_256_slowest"] = 1e3 * slowest
    report(Result("wavefront", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
