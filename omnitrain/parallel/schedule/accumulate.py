"""The gradients of one optimizer step, the same for every layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from omnitrain.errors import UserError
from omnitrain.models.foundation.zeros_in_step import ZerosInStep
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.timing import SpanRecorder
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.pipeline.apply import add_up_over_stages, keep_on_first_stage
from omnitrain.parallel.schedule.executor import Executor, ForwardContext, OnOutput, OnPhase
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.tensor.apply import add_up_over_tp, keep_on_first_tp_rank
from omnitrain.peers import SINGLE_PROCESS, GlooGroup
from omnitrain.recipe.suggest import hint


def accumulate_gradients(
    model: OmniModel,
    batch: StepBatch,
    *,
    loss_weights: Mapping[str, float] | None = None,
    on_output: OnOutput | None = None,
    on_phase: OnPhase | None = None,
    forward_context: ForwardContext | None = None,
    routers: RouterMonitor | None = None,
    recorder: SpanRecorder | None = None,
    upcoming: StepBatch | None = None,
) -> torch.Tensor:
    """Run forward and backward of this rank's micro-batches, in the order of its schedule.

    Every head's loss is its sum over the whole global batch, divided once by that batch's number of predicted tokens.
    So it does not depend on how samples are distributed over packs and ranks.

    Args:
        model: parallelized, or on one process; the gradients are added to those that its parameters have.
        batch: this rank's packs, planned by :class:`StepPlanner`.
        loss_weights: head -> weight in the total; 1 without an entry.
        on_output: called after each forward that computes losses, with the pack and its output.
        on_phase: called when a micro-batch begins its forward or its backward.
        forward_context: a context for every forward, such as a record of the experts' routing.
        routers: the model's routers; their losses are part of the total.
        recorder: records this rank's actions while it is on.
        upcoming: the next step, on a rank of a section that encodes ahead; None: nothing is encoded ahead.

    Returns:
        This rank's part of the total loss, a scalar without gradient; the parts of all ranks add up to it.

    Raises:
        UserError: packs that were not planned; the weight of a loss that the model does not have.
    """
    if not isinstance(batch, StepBatch):
        raise UserError(
            f"batch: found a {type(batch).__name__}; expected what the model's step_planner makes of this rank's "
            "packs: accumulate_gradients(model, plan_step(packs))"
        )
    weights, heads = loss_weights or {}, {*batch.plan.loss_counts, *model.compared}
    for name in weights.keys() - heads:
        raise UserError(f"loss_weights: the model has no loss {name!r}; {hint(name, heads)}")
    if routers is not None:
        routers.begin(batch.packs)
    schedule = schedule_of(model, batch.plan, None if upcoming is None else upcoming.plan)
    executor = Executor(
        model,
        batch,
        weights,
        on_output=on_output,
        on_phase=on_phase,
        forward_context=forward_context,
        routers=routers,
        recorder=recorder,
        upcoming=upcoming,
    )
    layout = layout_of(model)
    if layout is not None:
        for state, parameters in layout.by_tp_ranks(model):
            keep_on_first_tp_rank(parameters, state)
        if layout.pipeline is not None:
            keep_on_first_stage(layout.shared, layout.pipeline)
    zeros = ZerosInStep(model.runner.give_zeros)
    total = executor.run(schedule)
    if model.runner.give_zeros:
        zeros.drop_gradients(SINGLE_PROCESS if layout is None else GlooGroup(layout.state.all_groups("all")))
    if layout is not None:
        for state, parameters in layout.by_tp_ranks(model):
            add_up_over_tp(parameters, state)
        if layout.pipeline is not None:
            add_up_over_stages(layout.shared, layout.pipeline)
    return total
