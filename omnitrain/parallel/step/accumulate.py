"""The gradients of one optimizer step, the same for every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.components.media_calls import MediaCall
from omnitrain.models.components.outputs import OmniOutput
from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.layout import ModelLayout, layout_of, reduce_replicas
from omnitrain.parallel.sequence.apply import slice_of
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.parallel.step.feature_routing import positions_of, rows_for_parts
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.tensor.replicated_grads import add_up_over_tp
from omnitrain.parallel.watch.report import Phase
from omnitrain.plan import PlannedComponent, StepPlan
from omnitrain.recipe.suggest import hint

OnOutput = Callable[[Pack, OmniOutput], Any]
ForwardContext = Callable[[Pack, MicroBatchWork], AbstractContextManager[Any]]


class OnPhase(Protocol):
    """Called with a rank's position in a step."""

    def __call__(
        self, *, micro_batch: int | None = None, phase: Phase | None = None, samples: Sequence[str] | None = None
    ) -> object:
        """Arguments that are not given keep their last value."""
        ...


def accumulate_gradients(
    model: OmniModel,
    batch: StepBatch,
    *,
    loss_weights: Mapping[str, float] | None = None,
    on_output: OnOutput | None = None,
    on_phase: OnPhase | None = None,
    forward_context: ForwardContext | None = None,
    routers: RouterMonitor | None = None,
) -> torch.Tensor:
    """Run forward and backward of this rank's micro-batches.

    Every head's loss is its sum over the whole global batch, divided once by that batch's number of predicted tokens:
    how samples are spread over packs and ranks does not show.

    Args:
        model: parallelised, or on one process.
        batch: packs of this rank, and the plan of all.
        loss_weights: ``text`` or a decoder's name -> weight of its mean loss; absent: 1.
        on_output: called with pack and output of each micro-batch.
        on_phase: called before each phase (:meth:`omnitrain.parallel.watch.monitor.StallMonitor.at`).
        forward_context: pack and share of a micro-batch -> context of its forward.
        routers: whose losses belong to the total.

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
    weights, counts = loss_weights or {}, batch.plan.loss_counts
    for name in weights.keys() - counts.keys():
        raise UserError(f"loss_weights: the model has no loss {name!r}; {hint(name, counts)}")
    total = torch.zeros((), device=model.device)
    share = loss_share(model)
    if routers is not None:
        routers.begin(batch.packs)
    for number, pack in enumerate(batch.packs):
        pack = pack.to(model.device)
        if on_phase is not None:
            on_phase(micro_batch=number, phase="forward", samples=pack.info.ids)
        reduce_on_last(model, batch.plan, number)
        own = work_of(model, batch, number)
        with ExitStack() as stack:
            for context in (forward_context, routers.watched if routers is not None else None):
                if context is not None:
                    stack.enter_context(context(pack, own))
            output = model(pack, own)
        if any(counts.values()):  # the same on all ranks, since counts are global
            loss = _loss(output, weights, counts, routers) * share
            if on_phase is not None:
                on_phase(phase="backward")
            if loss.requires_grad:  # False if only a tower trains and no rank has media for it
                loss.backward()
            total += loss.detach()
            del loss
        if on_output is not None:
            on_output(pack, output)
        del output  # frees the graph, and with it the permutations of all MoE layers
    layout = layout_of(model)
    if layout is not None:
        add_up_over_tp(model.parameters(), layout.state)
    return total


def _loss(
    output: OmniOutput, weights: Mapping[str, float], counts: Mapping[str, int], routers: RouterMonitor | None
) -> torch.Tensor:
    """Return the weighted loss of a micro-batch."""
    # Sums over zero tokens enter, too: the backward of calls for other ranks hangs on the text's sum.
    terms = [weights.get(name, 1.0) * term.sum / max(counts[name], 1) for name, term in output.losses.items()]
    if routers is not None and (balance := routers.loss()) is not None:
        terms.append(balance)
    return torch.stack(terms).sum()


def loss_share(model: OmniModel) -> float:
    """Return 1 on the first tensor parallel rank, else 0: these ranks compute the same loss, which counts once."""
    layout = layout_of(model)
    return 1.0 if layout is None or layout.state.tp_rank == 0 else 0.0


def reduce_on_last(model: OmniModel, plan: StepPlan, micro_batch: int) -> None:
    """Make each component reduce over its replicas only in the last micro-batch in which it runs."""
    if layout_of(model) is not None:
        reduce_replicas(model, {c.name: plan.last_active(c.name) == micro_batch for c in plan.topology.components})


def work_of(model: OmniModel, batch: StepBatch, micro_batch: int) -> MicroBatchWork:
    """Return this rank's work in a micro-batch, from the step plan."""
    plan = batch.plan
    layout = layout_of(model)
    ranks = np.array(layout.state.loss_ranks if layout is not None else range(plan.topology.world_size))
    rank = int(np.searchsorted(ranks, _rank()))
    calls, heads, exchanges, cut = {}, set(), {}, set()
    sequence_slice = (
        None if layout is None else slice_of(layout.state, batch.packs[micro_batch].num_tokens, model.device)
    )
    for call_site, number in zip(plan.topology.call_sites, plan.calls[micro_batch].tolist(), strict=True):
        if call_site.kind == "encode":
            calls[call_site.name] = number
        elif call_site.kind == "head" and number:
            heads.add(call_site.name)
    for component in plan.topology.components:
        if plan.topology.moves(component.name) and plan.is_active(component.name, micro_batch):
            made = [item for call in plan.calls_of(rank, component.name, micro_batch) for item in call.items]
            routes = plan.routes(component.name, micro_batch)
            if sequence_slice is not None and component.place != "world" and component.head is None:
                cut.add(component.name)
                positions = positions_of(batch.packs[micro_batch], component)
                routes, made = rows_for_parts(routes, rank, positions, sequence_slice.split, made)
            routes = replace(routes, producer=ranks[routes.producer], consumer=ranks[routes.consumer])
            group = _group_of(layout, component)
            exchanges[component.name] = Exchange(routes, group, made=made, is_differentiable=component.is_trained)
    media_calls = {
        name: [MediaCall(call.items.to(model.device), call.samples) for call in drawn]
        for name, drawn in batch.media_calls[micro_batch].items()
    }
    towers = {} if layout is None else {name: found.tower for name, found in layout.components.items()}
    together = {name: tower.sharing for name, tower in towers.items() if tower is not None}
    return MicroBatchWork(
        calls=calls,
        heads=heads,
        media_calls=media_calls,
        exchanges=exchanges,
        sequence_slice=sequence_slice,
        cut=cut,
        together=together,
    )


def _group_of(layout: ModelLayout | None, component: PlannedComponent) -> dist.ProcessGroup | None:
    """Return the group of ranks that exchange the component's features."""
    if layout is None:
        return None
    return layout.state.loss_group if component.place == "world" else layout.state.sequence_group


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
