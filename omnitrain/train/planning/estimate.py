"""Estimate a step of a layout from counted parts: seconds by the schedule's own simulator, memory by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.parallel.pipeline.stages import stages_of
from omnitrain.parallel.placement import pipeline_shape, place_components
from omnitrain.parallel.resolve.sections import full_windows
from omnitrain.parallel.state import ParallelState, states_of_components
from omnitrain.plan.placement import Topology
from omnitrain.plan.schedule.actions import RECEIVES, Action, Kind, Schedule
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.simulate import MessageCost, Timeline, simulate
from omnitrain.plan.schedule.table import table_of
from omnitrain.plan.step import Rates, StepPlan, plan_step
from omnitrain.plan.tables import MicroBatchFacts, decode_tables, encode_table
from omnitrain.plan.wavefront.step import SectionLimits, StepOrder, rearranged
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.train.planning.cells import Cell, CountedPart, Work
from omnitrain.train.planning.devices import Device, Seconds
from omnitrain.train.planning.encoding import Encoding

_UPDATE_BYTES = 28  # that AdamW reads and writes for a parameter: 4 tensors read and 3 written, in fp32
_GATHERED = 2  # bytes of a gathered parameter
_AXES = ("tp", "ep", "ep_fsdp", "sequence", "cp", "sp", "fsdp")
_SHARE = {Kind.F: 1.0, Kind.B: 1.0, Kind.I: 0.5, Kind.W: 0.5}


@dataclass(frozen=True)
class Estimate:
    """A step of a layout.

    Attributes:
        seconds: of the step.
        idle: cause -> share of the step in which the busiest ranks wait for it: ``bubble``, ``exchanges`` (collectives
            that computation waits for), ``weights`` (gathers and reductions of FSDP beyond the computation),
            ``encoders`` (time that ranks of the foundation encode), ``sections`` (time that they wait for sections).
        memory: cause -> bytes on the fullest rank.
        tokens: of the step, over all ranks.
    """

    seconds: float
    idle: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())


class Price(NamedTuple):
    """What a pass takes on a device, wherever its ranks are.

    Attributes:
        computed: seconds.
        sent: collectives, the axis on which each of them runs, and how often.
    """

    computed: float
    sent: tuple[tuple[Collective, str, int], ...]


class PricedCell:
    """A cell on a device."""

    def __init__(self, cell: Cell, device: Device, counted_on: ParallelState) -> None:
        self.cell, self.device, self.counted_on = cell, device, counted_on
        kinds = {id(part): part for part in (*cell.blocks, cell.ends)}
        self._prices = {key: (self._price(part.forward), self._price(part.backward)) for key, part in kinds.items()}

    def of(self, part: CountedPart) -> tuple[Price, Price]:
        """Return the prices of a part's forward and backward."""
        return self._prices[id(part)]

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """Seconds that the forward and the backward of all parts compute."""
        prices = [self.of(part) for part in (*self.cell.blocks, self.cell.ends)]
        return sum(forward.computed for forward, _ in prices), sum(backward.computed for _, backward in prices)

    def _price(self, work: Work) -> Price:
        computed, sent = 0.0, []
        for one, times in work.items():
            if isinstance(one, Op):
                computed += self.device.seconds_of(one) * times
            else:
                sent.append((one, self._axis(one.ranks), times))
        return Price(computed, tuple(sent))

    def _axis(self, ranks: tuple[int, ...]) -> str:
        return next((axis for axis in _AXES if self.counted_on.ranks_along(axis) == ranks), "fsdp")


@dataclass(frozen=True)
class PlacedPlan:
    """A plan that is resolved on ranks that are not there."""

    plan: ParallelPlan  # of the user
    state: ParallelState  # the ranks of ``main``
    plans: Mapping[str, ComponentPlan]  # component -> its complete plan
    topology: Topology

    @classmethod
    def of(
        cls, model: OmniModel, plan: ParallelPlan, state: ParallelState, plans: Mapping[str, ComponentPlan]
    ) -> PlacedPlan:
        """Place the components of a model."""
        return cls(plan, state, plans, place_components(model, plans, states_of_components(state, plan, plans)))

    @property
    def sections(self) -> dict[str, ParallelState]:
        """Section -> its ranks."""
        return {name: self.state.of_section(name) for name in self.plan.sections}


class StepEstimate:
    """Estimates a step of one layout.

    Args:
        model: on the meta device, not parallelized.
        layout: of the model.
        priced: the parts of the foundation in this layout of a block.
        encodings: component -> what it does.
        drawn: the packs of a step, of one data-parallel rank after the other.
    """

    def __init__(
        self,
        model: OmniModel,
        layout: PlacedPlan,
        priced: PricedCell,
        encodings: Mapping[str, Encoding],
        drawn: Sequence[MicroBatchFacts],
    ) -> None:
        self._layout, self._priced, self._device, self._encodings = layout, priced, priced.device, encodings
        self._state, self._plan = layout.state, layout.plans[FOUNDATION]
        self._axes = {axis: self._state.ranks_along(axis) for axis in _AXES}
        self._has_stages = self._state.size("pp") > 1
        schedule = self._plan.schedule or PipelineSchedule()
        spans = stages_of(model, schedule, self._state).spans if self._has_stages else None
        blocks = priced.cell.blocks
        self._stages = [list(blocks[start:stop]) for start, stop in spans or ((0, len(blocks)),)]
        self._stages[-1].append(priced.cell.ends)  # their head takes most of the time
        self._timed = [(self._pass(stage, 0), self._pass(stage, 1)) for stage in self._stages]
        self._encoding_seconds = {name: self._seconds_of_element(encoding) for name, encoding in encodings.items()}
        self._tokens = max(sum(facts.lengths) for facts in drawn)
        self._hidden = model.foundation.get_input_embeddings().weight.size(1)
        self._step = self._planned(drawn)
        self._loads = {name: self._step.loads(name).max(axis=1) for name in encodings}
        self._features = {name: self._feature_bytes(name) for name in encodings}
        self._schedule, self._timeline = self._simulated()

    def estimate(self) -> Estimate:
        """Return the estimate."""
        number, own = self._step.num_micro_batches, self._timeline
        sharded = self._priced.cell.shards / self._state.size("fsdp")
        update = max(sum(part.optimizer for part in stage) for stage in self._stages) / 8 * sharded
        step = float(own.makespan) + update * _UPDATE_BYTES / self._device.bandwidth
        busiest = max((self._of_rank(rank) for rank in range(self._schedule.num_pipeline_ranks)), key=lambda s: s.total)
        waits = _waits_for_sections(own) / step
        idle = {
            "bubble": max(0.0, _bubble(own) * float(own.makespan) / step - waits),
            "exchanges": busiest.waited * number / step,
            "weights": max(0.0, busiest.beside - busiest.computed - busiest.waited) * number / step,
            "encoders": self._seconds_encoding() / step,
            "sections": waits,
        }
        return Estimate(step, idle, self._memory(), int(self._step.tokens.sum()))

    def _pass(self, stage: Sequence[CountedPart], which: int) -> Seconds:
        """The seconds of a stage's forward (0) or backward (1) of a micro-batch."""
        computed = waited = beside = 0.0
        for part in stage:
            price = self._priced.of(part)[which]
            computed += price.computed
            waited += self._sent(price, is_waited_for=True)
            beside += 0.0 if self._has_stages else self._sent(price, is_waited_for=False)
        if self._device.has_gloo:  # one after the other
            beside += computed + waited
        return Seconds(computed, waited, beside)

    def _sent(self, price: Price, *, is_waited_for: bool, kinds: Sequence[str] = ()) -> float:
        return sum(
            self._device.seconds_of_link(one) * times
            for one, times in self._collectives(price)
            if one.is_waited_for == is_waited_for and (not kinds or one.kind in kinds)
        )

    def _collectives(self, price: Price) -> Iterator[tuple[Collective, int]]:
        """Yield the collectives of a pass on the ranks of this layout, and how often each runs."""
        for collective, axis, times in price.sent:
            num_bytes = collective.num_bytes
            if axis == "ep_fsdp":  # a rank has fewer experts
                num_bytes = int(num_bytes * self._priced.counted_on.size("ep") / self._state.size("ep"))
            yield collective._replace(num_bytes=num_bytes, ranks=self._axes[axis]), times

    def _planned(self, drawn: Sequence[MicroBatchFacts]) -> StepPlan:
        """Plan the step as the ranks do, with micro-batches in the order in which sections delay nobody."""
        topology = self._layout.topology
        owners = topology.owners.tolist()
        each = len(drawn) // len(owners)
        of_rank = {rank: drawn[lane * each : (lane + 1) * each] for lane, rank in enumerate(owners)}
        listed = [encode_table(topology, of_rank.get(rank, ())) for rank in range(topology.world_size)]
        tables = decode_tables(topology, listed)
        if not self._layout.plan.sections:
            return plan_step(topology, tables)
        forward, backward = self._timed[0]
        per_cost = {name: self._encoding_seconds[name][0] for name in self._encodings}
        rates = Rates((forward.total + backward.total) / self._tokens, per_cost)
        limits = tuple(
            SectionLimits(counted, section.ranks, section.slots, section.in_flight, section.encode_twice)
            for section in self._layout.plan.sections.values()
            if (counted := tuple(name for name in section.components if name in self._encodings))
        )
        if limits and each > 1:
            order = StepOrder(limits, self._state.size("fsdp") > 1)
            tables = rearranged(topology, tables, order(topology, tables, rates))
        return plan_step(topology, tables, rates)

    def _seconds_of_element(self, encoding: Encoding) -> tuple[float, float]:
        """Seconds of forward and backward of an input element on one rank."""
        works = (encoding.part.forward, encoding.part.backward)
        forward, backward = (self._device.seconds(work).computed / encoding.elements for work in works)
        return forward, backward

    def _feature_bytes(self, name: str) -> np.ndarray:
        """``[M]``: bytes of the features of each micro-batch or window of a data-parallel rank, of the fullest one."""
        step, topology, encoding = self._step, self._layout.topology, self._encodings[name]
        items = topology.items_of(name, step.slot)
        cell = step.slot[items] // max(1, len(topology.media)) * topology.world_size + step.owner[items]
        number = step.num_micro_batches
        sums = np.bincount(cell, step.elements[items], number * topology.world_size).reshape(number, -1)
        return sums.max(axis=1) * encoding.feature_bytes / encoding.elements

    def _encode(self, name: str, window: int, *, is_backward: bool = False) -> float:
        """Seconds in which the ranks of a component encode a micro-batch or window, or run its backward."""
        load = int(self._loads[name][window])
        placement = self._layout.topology.component(name)
        if not load or (is_backward and not placement.is_trained):
            return 0.0
        state = self._state.of_section(self._layout.plan.section_of(name))
        whole = int(self._encodings[name].part.weights * _GATHERED / 4)
        ranks = state.ranks_along("fsdp")
        gathers = self._device.seconds_of_link(Collective("all_gather", whole, ranks, False))
        if is_backward:
            gathers += self._device.seconds_of_link(Collective("reduce_scatter", 2 * whole, ranks, False))
        seconds = self._encoding_seconds[name][is_backward] * load
        return seconds + gathers if self._device.has_gloo else max(seconds, gathers)

    def _exchange(self, name: str, window: int) -> float:
        topology = self._layout.topology
        if not topology.moves(name):
            return 0.0
        ranks = topology.component(name).ranks if topology.component(name).place == "world" else self._axes["tp"]
        return self._device.seconds_of_link(
            Collective("all_to_all", int(self._features[name][window]), tuple(ranks), True)
        )

    def _in_forward(self, micro_batch: int, *, is_backward: bool) -> float:
        """Seconds of the encoders that a forward, or a backward, of the first stage calls."""
        names = [name for name in self._layout.topology.names("forward") if name in self._encodings]
        return sum(
            self._encode(name, micro_batch, is_backward=is_backward) + self._exchange(name, micro_batch)
            for name in names
            if self._loads[name][micro_batch]
        )

    def _seconds(self, action: Action) -> float:
        if action.kind is Kind.OVERLAP_F_B:
            return sum(map(self._seconds, action.parts))
        if action.component != FOUNDATION:
            return self._seconds_of_encoder(action)
        if action.stage is None:
            return 0.0
        if action.kind in (Kind.UNSHARD, Kind.REDUCE):
            return self._seconds_of_weights(action)
        if action.kind not in _SHARE or action.micro_batch is None:
            return 0.0
        is_backward = action.kind is not Kind.F
        filled = self._step.tokens[action.micro_batch].max() / self._tokens
        seconds = self._timed[action.stage][is_backward].total * filled
        if action.stage == 0 and action.kind is not Kind.W:
            seconds += self._in_forward(action.micro_batch, is_backward=is_backward) / _SHARE[action.kind]
        return _SHARE[action.kind] * seconds

    def _seconds_of_encoder(self, action: Action) -> float:
        if action.kind in (Kind.ENCODE, Kind.ENCODE_B):
            return self._encode(action.component, action.micro_batch or 0, is_backward=action.kind is Kind.ENCODE_B)
        if action.kind is Kind.HEAD:  # forward and backward of what reads the hidden states, as of what gives features
            both = (False, True)
            return sum(self._encode(action.component, action.micro_batch or 0, is_backward=back) for back in both)
        return self._exchange(action.component, action.micro_batch or 0) if action.kind is Kind.EXCHANGE else 0.0

    def _seconds_of_weights(self, action: Action) -> float:
        """A pipeline gathers the weights of a stage once in a step, and reduces its gradients once."""
        assert action.stage is not None
        which, kind = (0, "all_gather") if action.kind is Kind.UNSHARD else (1, "reduce_scatter")
        prices = [self._priced.of(part)[which] for part in self._stages[action.stage]]
        return sum(self._sent(price, is_waited_for=False, kinds=(kind,)) for price in prices)

    def _simulated(self) -> tuple[Schedule, Timeline]:
        plan, number = self._layout.plan, self._step.num_micro_batches
        placements = [self._layout.topology.component(name) for name in self._encodings]
        schedule = table_of(pipeline_shape(self._plan), number, placements)
        if plan.sections:
            topology, plans = self._layout.topology, self._layout.plans
            heads, at_end = topology.heads_apart, topology.at_end
            windows = [full_windows(plan, plans, name, number, heads, at_end) for name in plan.sections]
            windows = [replace(of, encoded=self._active(of.encoded), heads=self._active(of.heads)) for of in windows]
            schedule = with_sections(schedule, windows, self._seconds, self._encode)
        return schedule, simulate(schedule, self._seconds, self._link())

    def _active(self, windows: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """The windows in which components encode, of those that are counted apart."""
        own = {name: windows[name] for name in windows if name in self._encodings}
        return {name: [one for one in numbers if self._step.is_active(name, one)] for name, numbers in own.items()}

    def _link(self) -> MessageCost:
        """What messages cost: inside of a node if the ranks of a pipeline, and those of sections, are all in it."""
        device, has_sections = self._device, bool(self._layout.plan.sections)
        last = self._layout.topology.world_size - 1 if has_sections else max(self._state.ranks_along("pp"))
        rate = (device.link if last < device.per_node else device.network) * device.memory_efficiency
        return MessageCost(device.latency, rate, self._message_bytes)

    def _message_bytes(self, action: Action) -> float:
        if action.component == FOUNDATION:
            return 2 * self._hidden * self._tokens / self._state.size("sequence")
        lanes, ranks = self._state.size("dp"), self._layout.plan.sections
        senders = ranks[self._layout.plan.section_of(action.component)].ranks
        return float(self._features[action.component][action.micro_batch or 0]) * max(1.0, lanes / senders)

    def _of_rank(self, rank: int) -> Seconds:
        """The seconds of a rank's stages, forward and backward of one micro-batch."""
        own = [part for stage in self._schedule.stages_of(rank) for part in self._timed[stage]]
        return Seconds(sum(s.computed for s in own), sum(s.waited for s in own), sum(s.beside for s in own))

    def _seconds_encoding(self) -> float:
        """Seconds of the first stage's rank in which it encodes."""
        row = self._schedule.actions[self._schedule.stage_ranks[0]]
        actions = sum(self._seconds_of_encoder(action) for action in row if action.component != FOUNDATION)
        both = product(range(self._step.num_micro_batches), (False, True))
        return actions + sum(self._in_forward(k, is_backward=is_backward) for k, is_backward in both)

    def _memory(self) -> dict[str, float]:
        """Cause -> bytes on the fullest rank."""
        found = [self._memory_of_stage_rank(rank) for rank in range(self._schedule.num_pipeline_ranks)]
        found += [self._memory_of_section(name, state) for name, state in self._layout.sections.items()]
        return max(found, key=lambda memory: sum(memory.values()))

    def _memory_of_stage_rank(self, rank: int) -> dict[str, float]:
        cell = self._priced.cell
        own = [part for stage in self._schedule.stages_of(rank) for part in self._stages[stage]]
        sharded = cell.shards / self._state.size("fsdp")
        found = {
            "weights": sum(part.weights for part in own) * sharded,
            "gradients": sum(part.gradients for part in own) * sharded,
            "optimizer": sum(part.optimizer for part in own) * sharded,
            "activations": self._most_kept(rank),
            "features": 0.0,
            "buffers": cell.transient,
        }
        if self._has_stages:  # its weights stay gathered, and gradients are reduced at the end of the step
            for part in own:
                forward, backward = self._priced.of(part)
                found["buffers"] += self._bytes_of_fsdp(forward, "all_gather")
                found["buffers"] += self._bytes_of_fsdp(backward, "reduce_scatter")
        for name, encoding in self._encodings.items():
            if self._layout.plan.section_of(name) == MAIN:
                if rank == 0 or self._layout.topology.component(name).edge == "exchange":
                    _add_static(found, encoding.part, self._state.size("fsdp"))
                found["features"] += 2 * float(self._features[name].max(initial=0))
        return found

    def _bytes_of_fsdp(self, price: Price, kind: str) -> float:
        """Bytes of the weights that FSDP gathers in a pass, or of the gradients that it reduces."""
        of_kind = ((one, times) for one, times in self._collectives(price) if one.kind == kind)
        return sum(one.num_bytes * times for one, times in of_kind if not one.is_waited_for)

    def _memory_of_section(self, section: str, state: ParallelState) -> dict[str, float]:
        found = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "features", "buffers"), 0.0)
        row = self._schedule.actions[self._schedule.num_pipeline_ranks + [*self._layout.sections].index(section)]
        for name in self._layout.plan.sections[section].components:
            if name in self._encodings:
                encoding = self._encodings[name]
                _add_static(found, encoding.part, state.size("fsdp"))
                found["features"] += 2 * float(self._features[name].max(initial=0))
                found["activations"] += self._kept_encoding(name, row)
        return found

    def _kept_encoding(self, name: str, row: Iterable[Action]) -> float:
        """The most bytes that forwards of an encoder keep at a time."""
        kept = most = 0.0
        encoding = self._encodings[name]
        for action in row:
            if action.component == name and action.kind in (Kind.ENCODE, Kind.ENCODE_B):
                size = float(self._loads[name][action.micro_batch or 0]) * encoding.part.kept / encoding.elements
                kept += size if action.kind is Kind.ENCODE else -size
                most = max(most, kept)
        return most

    def _most_kept(self, rank: int) -> float:
        """The most bytes that forwards of a rank keep at a time, from its actions in their order."""
        row = self._schedule.actions[rank]
        sizes = defaultdict[tuple[int, int], float](float)
        kept = most = 0.0
        for action in row:
            for part in action.passes:
                if part.stage is None or part.micro_batch is None:
                    continue
                key = (part.stage, part.micro_batch)
                if part.kind is Kind.F:
                    sizes[key] = sum(one.kept for one in self._stages[part.stage])
                    if part.stage == 0:
                        sizes[key] += self._kept_in_forward(part.micro_batch)
                    kept += sizes[key]
                    most = max(most, kept)
                elif part.kind in (Kind.B, Kind.W):
                    kept -= sizes.pop(key, 0.0)
        return most + sum(self._kept_encoding(name, row) for name in self._layout.topology.names("exchange"))

    def _kept_in_forward(self, micro_batch: int) -> float:
        return sum(
            float(self._loads[name][micro_batch]) * self._encodings[name].part.kept / self._encodings[name].elements
            for name in self._layout.topology.names("forward")
            if name in self._encodings
        )


def _add_static(memory: dict[str, float], part: CountedPart, shards: int) -> None:
    for cause in ("weights", "gradients", "optimizer"):
        memory[cause] += getattr(part, cause) / shards


def _bubble(timeline: Timeline) -> float:
    """Share of the step in which ranks of the foundation do not compute, mean over these."""
    ranks = range(timeline.schedule.num_pipeline_ranks)
    return float(sum(map(timeline.idle, ranks)) / timeline.makespan / len(ranks)) if timeline.makespan else 0.0


def _waits_for_sections(timeline: Timeline) -> float:
    """Seconds for which the first stage waits for messages of sections."""
    waited = free = 0.0
    for event in timeline.events[timeline.schedule.stage_ranks[0]]:
        if event.action.kind in RECEIVES and event.action.stage is None:
            waited += max(0.0, float(event.end) - free)
        if event.action.computes or event.action.kind in RECEIVES:
            free = max(free, float(event.end))
    return waited
