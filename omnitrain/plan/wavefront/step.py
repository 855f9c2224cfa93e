"""Order the micro-batches of a step, and deal them to the data-parallel ranks, so that sections delay nobody."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from omnitrain.plan.placement import Topology
from omnitrain.plan.step import Rates
from omnitrain.plan.tables import StepTables
from omnitrain.plan.wavefront.feeds import Feeder, Sink, Wavefront
from omnitrain.plan.wavefront.search import best_order
from omnitrain.plan.wavefront.simulate import makespan


def deal(work: Sequence[float], load: Sequence[float], num_lanes: int, *, coupled: bool = False) -> list[int]:
    """Return ``[samples]`` the lane of each sample; numbers of samples per lane differ by one at most.

    ``work`` and ``load`` ``[samples]`` are seconds in the critical section, and in the sections that feed it. Coupled
    lanes run in rounds and wait for the longest sample of a round, so a round gets samples of like length. Otherwise
    loads are balanced first, then work.
    """
    lane = [0] * len(work)
    sums = [(0.0, 0.0)] * num_lanes  # load, work
    longest_first = sorted(range(len(work)), key=lambda s: (-work[s], s))
    if coupled:
        batches = [(longest_first[i : i + num_lanes], 1) for i in range(0, len(work), num_lanes)]
        room = [len(batches)] * num_lanes
    else:
        fed, plain = [s for s in longest_first if load[s] > 0], [s for s in longest_first if load[s] <= 0]
        batches = [(fed, 1), (plain, -1)]
        room = [len(work) // num_lanes + (k < len(work) % num_lanes) for k in range(num_lanes)]
    for batch, direction in batches:  # of the comparison of sums: 1: by load, then work; -1: by work, then load
        free = [(sums[k][::direction], k) for k in range(num_lanes) if room[k]]
        heapq.heapify(free)
        for sample in sorted(batch, key=lambda s: -load[s]):
            _, chosen = heapq.heappop(free)
            lane[sample] = chosen
            room[chosen] -= 1
            sums[chosen] = (sums[chosen][0] + load[sample], sums[chosen][1] + work[sample])
            if room[chosen] and not coupled:  # a round has one sample of each lane
                heapq.heappush(free, (sums[chosen][::direction], chosen))
    return lane


LEAST_GAIN = 0.01  # of the step's time, for which packs move to other ranks


class SectionLimits(NamedTuple):
    """The settings of a section that decide the order."""

    components: tuple[str, ...]  # its encoders and decoders
    num_ranks: int  # they divide the items of a micro-batch
    slots: int  # of how many micro-batches features may wait
    in_flight: int | None  # of how many activations may be kept; None: any number
    encode_twice: bool  # backwards repeat their forwards
    decoders: tuple[str, ...] = ()  # those of its components whose losses it computes


class MicroBatchOrder(NamedTuple):
    """The micro-batches that a data-parallel rank runs, in order: ``[M]`` which rank drew each, and its index there."""

    lane: np.ndarray
    micro_batch: np.ndarray


@dataclass(frozen=True)
class StepOrder:
    """Chooses which rank runs which micro-batch, and when. Picklable; the result is the same on all ranks.

    Data-parallel ranks run their n-th micro-batches together (a round). Micro-batches stay on the rank that drew them,
    unless the step becomes shorter by more than 1 % if they are dealt anew.
    """

    sections: tuple[SectionLimits, ...]  # the sections of the run
    coupled: bool  # whether data-parallel ranks wait for each other in each layer (FSDP, experts)
    extra_forwards: int = 0  # that a rank runs before its first backward, beyond one

    def __call__(self, topology: Topology, tables: StepTables, rates: Rates) -> tuple[MicroBatchOrder, ...]:
        """Return the micro-batches of each data-parallel rank, equally many, in the order of ``topology.owners``."""
        owners, number = topology.owners, len(tables.counts)
        work = rates.of_packs(tables.tokens, tables.squares)[:, owners].T.ravel()  # sample = lane * M + micro-batch
        feeders = tuple(self._feeder(topology, tables, rates, section) for section in self.sections)
        drawn = np.repeat(np.arange(len(owners)), number)
        with_losses = [section for section in self.sections if section.decoders]
        sinks = tuple(self._sink(topology, tables, rates, section) for section in with_losses)
        lanes = work.tolist(), drawn.tolist(), len(owners)
        as_drawn = Wavefront(*lanes, feeders, self.coupled, sinks, self.extra_forwards)
        orders = [(as_drawn, best_order(as_drawn))]
        if len(owners) > 1:
            loads = [np.add(feeder.forward, feeder.backwards) for feeder in feeders]
            load = np.sum([*loads, *(np.array(sink.seconds) for sink in sinks)], axis=0)
            dealt = replace(as_drawn, lane=deal(work.tolist(), load.tolist(), len(owners), coupled=self.coupled))
            orders.append((dealt, best_order(dealt)))
        seconds = [makespan(wave, order) for wave, order in orders]
        wave, order = orders[-1] if seconds[-1] < (1 - LEAST_GAIN) * seconds[0] else orders[0]
        return tuple(MicroBatchOrder(*divmod(np.array(samples), number)) for samples in wave.lanes_of(order))

    def _feeder(self, topology: Topology, tables: StepTables, rates: Rates, section: SectionLimits) -> Feeder:
        """The section as one feeder of all data-parallel ranks, since it divides each round among its ranks."""
        owners, number = topology.owners, len(tables.counts)
        forward, backward = np.zeros(number * len(owners)), np.zeros(number * len(owners))
        for component in section.components:
            seconds = encoding_seconds(topology, tables, component, rates.per_cost[component]) / section.num_ranks
            forward += seconds
            backward += 2 * seconds * topology.component(component).is_trained
        slots, lanes = section.slots, len(owners)
        kept = None if section.in_flight is None else section.in_flight * lanes
        return Feeder(forward.tolist(), backward.tolist(), tuple(range(lanes)), slots, kept, section.encode_twice)

    def _sink(self, topology: Topology, tables: StepTables, rates: Rates, section: SectionLimits) -> Sink:
        """The decoders of a section: forward and backward of a head take three times as long as a forward of items."""
        seconds = np.zeros(len(tables.counts) * len(topology.owners))
        for decoder in section.decoders:
            seconds += 3 * encoding_seconds(topology, tables, decoder, rates.per_cost[decoder]) / section.num_ranks
        return Sink(seconds.tolist(), tuple(range(len(topology.owners))))


def encoding_seconds(topology: Topology, tables: StepTables, component: str, per_cost: float) -> np.ndarray:
    """Return ``[lanes * M]``: the seconds in which one rank encodes the items of each micro-batch, lane by lane."""
    owners, number = topology.owners, len(tables.counts)
    micro_batch, medium = np.divmod(tables.slot, max(1, len(topology.media)))
    media = topology.media_of(component)
    own = (medium >= media.start) & (medium < media.stop)
    cell = np.searchsorted(owners, tables.owner[own]) * number + micro_batch[own]
    return np.asarray(per_cost * np.bincount(cell, tables.cost[own], number * len(owners)))


def rearranged(topology: Topology, tables: StepTables, drawn: Sequence[MicroBatchOrder]) -> StepTables:
    """Return the tables as if each data-parallel rank had drawn the micro-batches that it runs."""
    owners, number, num_media = topology.owners, len(tables.counts), max(1, len(topology.media))
    lane = np.stack([of_lane.lane for of_lane in drawn])  # [lanes, M]
    micro_batch = np.stack([of_lane.micro_batch for of_lane in drawn])
    source = owners[lane]
    counts = np.zeros_like(tables.counts)
    sums = {name: np.zeros_like(getattr(tables, name)) for name in ("num_samples", "tokens", "squares")}
    for index, owner in enumerate(owners.tolist()):
        counts[:, :, owner] = tables.counts[micro_batch[index], :, source[index]]
        for name, found in sums.items():
            found[:, owner] = getattr(tables, name)[micro_batch[index], source[index]]
    runs = np.empty(
        (len(owners), number), dtype=np.int64
    )  # (lane, micro-batch) that drew -> lane * M + place that runs
    runs[lane, micro_batch] = np.arange(len(owners) * number).reshape(len(owners), number)
    drawn_in, medium = np.divmod(tables.slot, num_media)
    runner, place = np.divmod(runs[np.searchsorted(owners, tables.owner), drawn_in], number)
    owner, slot = owners[runner], place * num_media + medium
    order = np.lexsort((slot, owner))
    return StepTables(
        num_drawn=tables.num_drawn,
        counts=counts,
        **sums,
        owner=owner[order],
        slot=slot[order],
        item_tokens=tables.item_tokens[order],
        cost=tables.cost[order],
        elements=tables.elements[order],
        shape=tables.shape[order],
        together=tables.together[order],
    )


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
