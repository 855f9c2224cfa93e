"""Run a rank's step under a meter: a real rank, or a rank of a fake world."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.routing_replay import evenly_routed
from omnitrain.ops.rank_meter import Mark, RankMeter
from omnitrain.ops.timing import SpanRecorder, What
from omnitrain.optim.gradients import clip_gradients
from omnitrain.parallel.fake_world import fake_world, parallelize_in, plan_alone
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan.schedule.actions import Action
from omnitrain.recipe import Optimizer, ParallelPlan
from omnitrain.train.lr_groups import optimizer_of


@dataclass(frozen=True)
class Training:
    """What trains, whatever the layout.

    Attributes:
        model: on the meta device, not parallelized; it stays as it is.
        optimizer: its settings.
        mixed_precision: see :class:`~omnitrain.parallel.resolve.sources.CallFlags`.
        pack: a typical one.
    """

    model: OmniModel
    optimizer: Optimizer
    mixed_precision: bool | None
    pack: Pack


class ActionRun(NamedTuple):
    """An action of a rank's schedule, and what was counted from its start to its end."""

    action: Action
    alive: int  # bytes when it began
    end: Mark


@dataclass(frozen=True)
class RankRun:
    """What a rank holds and does in a step; sizes in bytes.

    Attributes:
        weights: its parameters and buffers.
        gradients: what the backwards leave.
        optimizer: what the update leaves.
        peak: the most at any time, with the state of the optimizer from the steps before.
        shards: number of ranks over which FSDP shards parameters of the foundation.
        actions: of its schedule, in order.
        update: from the end of the last backward to the end of the optimizer's step.
    """

    weights: int
    gradients: int
    optimizer: int
    peak: int
    shards: int
    actions: tuple[ActionRun, ...]
    update: Mark

    @property
    def activations(self) -> int:
        """All else at the peak: what forwards keep, features, gathered weights, and buffers."""
        return self.peak - self.weights - self.gradients - self.optimizer


class _Actions(SpanRecorder):
    """Records what a meter counts in place of times."""

    def __init__(self, meter: RankMeter) -> None:
        super().__init__()
        self.is_on, self.meter, self.runs = True, meter, list[ActionRun]()

    def mark(self) -> Any:
        return self.meter.mark()

    def add(self, what: What, start: Any, end: Any) -> None:
        self.runs.append(ActionRun(Action.parse(what.name), start.alive, end))


def predict_rank(training: Training, plan: ParallelPlan, num_ranks: int, num_packs: int, rank: int = 0) -> RankRun:
    """Run a rank of a layout in a fake world; ``num_packs``: of each data-parallel rank in a step."""
    with fake_world(num_ranks, rank) as mode:
        model = copy.deepcopy(training.model)
        parallelize_in(mode, model, plan, training.mixed_precision)
        batch = plan_alone(model, [training.pack] * num_packs)
        return run_rank(model, batch, training.optimizer, mode)


def run_rank(
    model: OmniModel,
    batch: StepBatch,
    settings: Optimizer,
    mode: AbstractContextManager[Any] | None = None,
) -> RankRun:
    """Run two steps of a parallelized model, and return what the second one holds and does.

    In the second one the state of the optimizer exists, as in all later ones. All experts get equally many tokens.
    ``mode``: of a fake world.
    """
    with mode or nullcontext(), RankMeter() as meter:
        layout = layout_of(model)
        optimizer = optimizer_of(model, settings, layout)
        meter.hold([*model.parameters(), *model.buffers()])
        weights = meter.alive
        _step(model, batch, optimizer, settings, meter)
        optimizer_bytes = meter.alive - weights
        runs, gradients, update = _step(model, batch, optimizer, settings, meter)
    peak = max(update.peak, *(run.end.peak for run in runs))
    shards = 1 if layout is None else layout.state.size("fsdp")
    return RankRun(weights, gradients - weights - optimizer_bytes, optimizer_bytes, peak, shards, tuple(runs), update)


def _step(
    model: OmniModel, batch: StepBatch, optimizer: torch.optim.Optimizer, settings: Optimizer, meter: RankMeter
) -> tuple[list[ActionRun], int, Mark]:
    def routed(pack: Pack, work: MicroBatchWork) -> AbstractContextManager[Any]:
        own = work.sequence_slice
        return evenly_routed(model, sum(pack.info.lengths) if own is None else len(own.positions))

    meter.mark()
    recorder = _Actions(meter)
    accumulate_gradients(model, batch, recorder=recorder, forward_context=routed)
    gradients = meter.alive
    clip_gradients(list(model.parameters()), settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return recorder.runs, gradients, meter.mark()
