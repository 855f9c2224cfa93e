"""Order the samples of a step so that ranks which wait for features of other ranks wait as little as possible."""

from omnitrain.plan.wavefront.bounds import lower_bound
from omnitrain.plan.wavefront.deal import deal
from omnitrain.plan.wavefront.feeds import Feeder, Wavefront
from omnitrain.plan.wavefront.search import best_order
from omnitrain.plan.wavefront.simulate import Timeline, makespan, simulate
from omnitrain.plan.wavefront.validate import require_valid

__all__ = [
    "Feeder",
    "Timeline",
    "Wavefront",
    "best_order",
    "deal",
    "lower_bound",
    "makespan",
    "require_valid",
    "simulate",
]
