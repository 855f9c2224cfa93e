"""Deal the packs of a step to the data-parallel ranks by cost, so that no rank waits for one with expensive samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnitrain.plan.placement import Topology
from omnitrain.plan.step import Rates
from omnitrain.plan.tables import StepTables
from omnitrain.plan.wavefront.step import LEAST_GAIN, MicroBatchOrder, deal, encoding_seconds

_SWAPS_PER_LANE = 4
_LEAST_STEP = 1e-3  # of the gap between two lanes, that a swap must close


@dataclass(frozen=True)
class CostOrder:
    """Chooses the rank and the micro-batch of each pack of a step. Picklable; the result is the same on all ranks.

    Packs stay on the rank that drew them, unless the step becomes shorter by more than 1 % if they are dealt anew.
    """

    inside: tuple[str, ...]  # encoders that each rank runs in its forwards, for the items of its packs
    # whether data-parallel ranks wait for each other in each layer (FSDP, experts). Then their n-th micro-batches
    # should cost the same; otherwise only their sums
    coupled: bool

    def __call__(self, topology: Topology, tables: StepTables, rates: Rates) -> tuple[MicroBatchOrder, ...]:
        """Return the micro-batches of each data-parallel rank; see :meth:`StepOrder.__call__`."""
        owners, number = topology.owners, len(tables.counts)
        work = rates.of_packs(tables.tokens, tables.squares)[:, owners].T.ravel()  # pack = lane * M + micro-batch
        load = np.zeros(len(work))
        for component in self.inside:
            forward = encoding_seconds(topology, tables, component, rates.per_cost[component])
            load += forward * (3 if topology.component(component).is_trained else 1)
        lanes = dealt_packs(work, load, len(owners), coupled=self.coupled)
        return tuple(MicroBatchOrder(*divmod(packs, number)) for packs in lanes)


def dealt_packs(work: np.ndarray, load: np.ndarray, num_lanes: int, *, coupled: bool) -> list[np.ndarray]:
    """Return the packs of each lane, equally many, in order; seconds are lane by lane as packs were drawn."""
    drawn = list(np.arange(len(work)).reshape(num_lanes, -1))
    nothing = [0.0] * len(work)
    candidates = [drawn]
    for first, second in ((work + load, nothing), (work, load.tolist())) if load.any() else ((work, nothing),):
        lane = np.array(deal(first.tolist(), second, num_lanes, coupled=coupled))
        longest_first = np.lexsort((np.arange(len(work)), -first))
        lanes = [longest_first[lane[longest_first] == number] for number in range(num_lanes)]
        candidates.append(lanes if coupled else evened(work + load, lanes))
    seconds = [step_seconds(work, load, lanes, coupled=coupled) for lanes in candidates]
    best = int(np.argmin(seconds))
    return candidates[best] if seconds[best] < (1 - LEAST_GAIN) * seconds[0] else drawn


def evened(cost: np.ndarray, lanes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Swap packs between the most and the least expensive lane while that brings the two together."""
    lanes = [packs.copy() for packs in lanes]
    sums = np.array([cost[packs].sum() for packs in lanes])
    for _ in range(_SWAPS_PER_LANE * len(lanes)):
        high, low = int(sums.argmax()), int(sums.argmin())
        gap = sums[high] - sums[low]
        moved = cost[lanes[high]][:, None] - cost[lanes[low]]  # to the least expensive lane, by each swap of two packs
        off = np.abs(moved - gap / 2)
        give, take = np.unravel_index(int(off.argmin()), off.shape)
        if off[give, take] >= gap / 2 * (1 - _LEAST_STEP):
            break
        lanes[high][give], lanes[low][take] = lanes[low][take], lanes[high][give]
        sums[high] -= moved[give, take]
        sums[low] += moved[give, take]
    return lanes


def step_seconds(work: np.ndarray, load: np.ndarray, lanes: Sequence[np.ndarray], *, coupled: bool) -> float:
    """Return how long a step takes: the longest lane, or the sum of the longest packs of all rounds.

    Coupled lanes wait for each other after the encoders, too, so the longest of both count.
    """
    of_lanes, loads = (np.stack([values[packs] for packs in lanes]) for values in (work, load))
    if coupled:
        return float(of_lanes.max(axis=0).sum() + loads.max(axis=0).sum())
    return float((of_lanes + loads).sum(axis=1).max())
