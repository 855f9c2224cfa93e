"""Random steps with sections."""

from dataclasses import replace
from random import Random

from omnitrain.plan.wavefront.feeds import Feeder, Sink, Wavefront


def random_wave(random: Random, samples: int, lanes: int, *, feeders: int = 1, coupled: bool = False) -> Wavefront:
    """Return a step whose feeders serve all lanes; times, limits and what is trained are drawn."""
    drawn = []
    for _ in range(feeders):
        forward = [random.choice((0.0, 1.0)) * random.uniform(0.1, 1.0) for _ in range(samples)]
        factor = random.choice((0.0, 2.0))
        slots, in_flight = random.randint(1, 3), random.choice((lanes, 4, None) if coupled else (1, 2, 4, None))
        twice = random.random() < 0.2
        backward = [factor * seconds for seconds in forward]
        drawn.append(Feeder(forward, backward, tuple(range(lanes)), slots, in_flight, twice))
    work = [random.uniform(0.5, 3.0) for _ in range(samples)]
    return Wavefront(work, [s % lanes for s in range(samples)], lanes, tuple(drawn), coupled)


def with_sinks(random: Random, wave: Wavefront, sinks: int) -> Wavefront:
    """Return a step that also has sinks, and sometimes a further forward; its feeders keep as many as it needs."""
    lanes, extra = tuple(range(wave.num_lanes)), random.randint(0, 1)
    drawn = [[random.choice((0.0, 1.0)) * random.uniform(0.1, 1.0) for _ in wave.work] for _ in range(sinks)]
    feeders = tuple(
        replace(feeder, in_flight=feeder.in_flight and feeder.in_flight + 2 * len(lanes)) for feeder in wave.feeders
    )
    behind = tuple(Sink(seconds, lanes) for seconds in drawn)
    return replace(wave, feeders=feeders, sinks=behind, extra_forwards=extra)
