"""Estimate a step of a layout from counted parts: seconds by the schedule's own simulator, memory by cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import Collective
from omnitrain.parallel.pipeline.apply import schedule_of_plan
from omnitrain.parallel.pipeline.stages import stages_of
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.simulate import MessageCost, simulate
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.train.planning.cells import Cell, CountedPart
from omnitrain.train.planning.devices import Device, Seconds

_UPDATE_BYTES = 28  # that AdamW reads and writes for a parameter: 4 tensors read and 3 written, in fp32


@dataclass(frozen=True)
class Estimate:
    """A step of a layout.

    Attributes:
        seconds: of the step.
        idle: cause -> share of the step in which the busiest ranks wait for it: ``bubble``, ``exchanges`` (collectives
            that computation waits for), ``weights`` (gathers and reductions of FSDP beyond the computation).
        memory: cause -> bytes on the fullest rank.
        tokens: of the step, over all ranks.
        flops: that the model needs for the step, over all ranks.
    """

    seconds: float
    idle: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())


def estimate(
    model: OmniModel,
    plan: ComponentPlan,
    state: ParallelState,
    cell: Cell,
    device: Device,
    num_micro_batches: int,
    pack_tokens: int,
) -> Estimate:
    """Estimate a step of a layout.

    Args:
        model: on the meta device, not parallelized.
        plan: the complete plan of the foundation.
        state: its ranks.
        cell: the parts of the model in this layout of a block.
        device: of each rank.
        num_micro_batches: of each rank, in a step.
        pack_tokens: tokens of a pack.
    """
    schedule = schedule_of_plan(plan, num_micro_batches)
    spans = stages_of(model, plan.schedule or PipelineSchedule(), state).spans if state.size("pp") > 1 else None
    stages = _stages(cell, spans or ((0, len(cell.blocks)),))
    timed = [_timed(stage, cell, device, state) for stage in stages]

    def seconds(action: Action) -> float:
        if action.kind is Kind.OVERLAP_F_B:
            return sum(map(seconds, action.parts))
        if action.stage is None or action.kind not in _SHARE:
            return 0.0
        forward, backward = timed[action.stage]
        return _SHARE[action.kind] * (forward if action.kind is Kind.F else backward).total

    hidden = model.foundation.get_input_embeddings().weight.size(1)
    local_tokens = pack_tokens // state.size("sequence")
    link = MessageCost(device.latency, device.network * device.memory_efficiency, lambda _: 2 * hidden * local_tokens)
    timeline = simulate(schedule, seconds, link)
    update = max(sum(part.optimizer for part in stage) for stage in stages) / 8 * cell.shards / state.size("fsdp")
    step = float(timeline.makespan) + update * _UPDATE_BYTES / device.bandwidth
    of_rank = _worst([_rank_seconds(timed, schedule, rank) for rank in range(schedule.num_ranks)])
    idle = {
        "bubble": float(timeline.bubble),
        "exchanges": of_rank.waited * num_micro_batches / step,
        "weights": max(0.0, of_rank.beside - of_rank.computed - of_rank.waited) * num_micro_batches / step,
    }
    replicas = state.size("dp")
    tokens = pack_tokens * num_micro_batches * replicas
    return Estimate(step, idle, _memory(stages, schedule, cell, state), tokens)


_SHARE = {Kind.F: 1.0, Kind.B: 1.0, Kind.I: 0.5, Kind.W: 0.5}


def _stages(cell: Cell, spans: Sequence[tuple[int, int]]) -> list[list[CountedPart]]:
    """The parts of each stage; the ends are on the last one, where their head is."""
    stages = [list(cell.blocks[start:stop]) for start, stop in spans]
    stages[-1].append(cell.ends)
    return stages


def _timed(stage: Sequence[CountedPart], cell: Cell, device: Device, state: ParallelState) -> tuple[Seconds, Seconds]:
    """The seconds of a stage's forward and backward of a micro-batch."""
    forward, backward = _Sum(), _Sum()
    ranks = state.ranks_along("fsdp")
    for part in stage:
        whole = int(part.weights * cell.shards / 2)  # gathered in bf16, from fp32 shards
        gathers = device.seconds_of_link(Collective("all_gather", whole, ranks, False))
        reduces = device.seconds_of_link(Collective("reduce_scatter", 2 * whole, ranks, False))
        forward.add(device.seconds(_without_fsdp(part.forward)), gathers)
        backward.add(device.seconds(_without_fsdp(part.backward)), gathers + reduces)
    return forward.seconds, backward.seconds


class _Sum:
    def __init__(self) -> None:
        self.computed = self.waited = self.beside = 0.0

    def add(self, seconds: Seconds, beside: float) -> None:
        self.computed += seconds.computed
        self.waited += seconds.waited
        self.beside += beside

    @property
    def seconds(self) -> Seconds:
        return Seconds(self.computed, self.waited, self.beside)


def _without_fsdp(work: Any) -> dict[Any, int]:
    """Work without the gathers of the cell, whose ranks are fewer."""
    return {one: times for one, times in work.items() if not isinstance(one, Collective) or one.is_waited_for}


def _rank_seconds(timed: Sequence[tuple[Seconds, Seconds]], schedule: Schedule, rank: int) -> Seconds:
    """The seconds of a rank's stages, forward and backward of one micro-batch."""
    total = _Sum()
    for stage, of_rank in enumerate(schedule.stage_ranks):
        if of_rank == rank:
            for part in timed[stage]:
                total.add(part, part.beside)
    return total.seconds


def _worst(ranks: Sequence[Seconds]) -> Seconds:
    return max(ranks, key=lambda seconds: seconds.total)


def _memory(
    stages: Sequence[Sequence[CountedPart]], schedule: Schedule, cell: Cell, state: ParallelState
) -> dict[str, float]:
    """Cause -> bytes on the fullest rank."""
    found: list[dict[str, float]] = []
    sharded = cell.shards / state.size("fsdp")
    for rank in range(schedule.num_ranks):
        own = [part for stage, parts in enumerate(stages) if schedule.stage_ranks[stage] == rank for part in parts]
        found.append(
            {
                "weights": sum(part.weights for part in own) * sharded,
                "gradients": sum(part.gradients for part in own) * sharded,
                "optimizer": sum(part.optimizer for part in own) * sharded,
                "activations": _most_kept(stages, schedule, rank),
                "buffers": cell.transient,
            }
        )
    return max(found, key=lambda memory: sum(memory.values()))


def _most_kept(stages: Sequence[Sequence[CountedPart]], schedule: Schedule, rank: int) -> float:
    """The most bytes that forwards of a rank keep at a time, from its actions in their order."""
    kept = most = 0.0
    for action in schedule.actions[rank]:
        for part in action.passes:
            if part.stage is None:
                continue
            size = sum(one.kept for one in stages[part.stage])
            if part.kind is Kind.F:
                kept += size
                most = max(most, kept)
            elif part.kind in (Kind.B, Kind.W):
                kept -= size
    return most
