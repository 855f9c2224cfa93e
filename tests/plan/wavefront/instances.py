"""Random steps with sections."""

from random import Random

from omnitrain.plan.wavefront.feeds import Feeder, Wavefront


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
