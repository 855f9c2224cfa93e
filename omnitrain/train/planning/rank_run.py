"""Run a rank's step under a meter: a real rank, or a rank of a fake world."""

from __future__ import annotations

import copy
import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention.spec import forget_specs
from omnitrain.ops.experts.routing_replay import evenly_routed
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.rank_meter import Mark, RankMeter
from omnitrain.ops.timing import SpanRecorder, What
from omnitrain.optim.adamw import local_shard
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
        stays: of a step after its end besides, such as gathered weights of a mesh of one rank.
        actions: of its schedule, in order.
        update: from the end of the last backward to the end of the optimizer's step.
    """

    weights: int
    gradients: int
    optimizer: int
    peak: int
    shards: int
    stays: int
    actions: tuple[ActionRun, ...]
    update: Mark


class _Actions(SpanRecorder):
    """Records what a meter counts in place of times."""

    def __init__(self, meter: RankMeter) -> None:
        super().__init__()
        self.is_on, self.meter, self.runs = True, meter, list[ActionRun]()

    def mark(self) -> Any:
        return self.meter.mark()

    def add(self, what: What, start: Any, end: Any) -> None:
        self.runs.append(ActionRun(Action.parse(what.name), start.alive, end))


def predict_rank(
    training: Training, plan: ParallelPlan, num_ranks: int, num_packs: int, rank: int = 0, *, adds: bool = False
) -> RankRun:
    """Run a rank of a layout in a fake world.

    ``num_packs``: of each data-parallel rank in a step. ``adds``: gradients of earlier packs exist, to which these add.
    """
    with fake_world(num_ranks, rank) as mode:
        model = copy.deepcopy(training.model)
        parallelize_in(mode, model, plan, training.mixed_precision)
        batch = plan_alone(model, [training.pack] * num_packs)
        return run_rank(model, batch, training.optimizer, mode, adds=adds)


def run_rank(
    model: OmniModel,
    batch: StepBatch,
    settings: Optimizer,
    mode: AbstractContextManager[Any] | None = None,
    *,
    adds: bool = False,
) -> RankRun:
    """Run a step of a parallelized model with the state of the optimizer, and return what the rank holds and does.

    A real rank runs another step before it; in a fake world the optimizer gets gradients without content in its place.
    All experts get equally many tokens. ``mode``: of a fake world. ``adds``:
    gradients of earlier packs exist, to which these add.
    """
    forget_specs()  # or a run would not count the tables of masks that a run before it has made
    with mode or nullcontext(), RankMeter() as meter:
        layout = layout_of(model)
        optimizer = optimizer_of(model, settings, layout)
        meter.hold([one for one in model.parameters() if not one.is_meta])  # those on meta are on other ranks
        meter.hold(model.buffers())
        weights = meter.alive
        if mode is None:
            _accumulate(model, batch, meter)
            gc.collect()  # or the update would free what circles of the step hold
        else:
            for parameter in model.parameters():
                parameter.grad = (
                    torch.empty_like(parameter) if parameter.requires_grad and not parameter.is_meta else None
                )
        without_state = meter.alive
        optimizer.step()
        state = meter.alive - without_state
        if not adds:
            optimizer.zero_grad(set_to_none=True)
        meter.mark()
        runs = _accumulate(model, batch, meter)
        gradients = sum(local_shard(one.grad).nbytes for one in model.parameters() if one.grad is not None)
        clip_gradients(list(model.parameters()), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update = meter.mark()
    peak = max(update.peak, *(run.end.peak for run in runs))
    shards, stays = 1 if layout is None else layout.state.size("fsdp"), update.alive - weights - state
    return RankRun(weights, gradients, state, peak, shards, stays, tuple(runs), update)


def _accumulate(model: OmniModel, batch: StepBatch, meter: RankMeter) -> list[ActionRun]:
    """Run the forwards and backwards of a step."""
    has_experts = any(True for _ in experts_in(model.foundation))

    def routed(encoded: EncodedPack) -> AbstractContextManager[Any]:
        if not has_experts:
            return nullcontext()
        own = encoded.sequence_slice
        return evenly_routed(model, sum(encoded.pack.info.lengths) if own is None else len(own.positions))

    recorder = _Actions(meter)
    accumulate_gradients(model, batch, recorder=recorder, forward_context=routed)
    return recorder.runs
