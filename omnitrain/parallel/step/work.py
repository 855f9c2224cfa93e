"""This rank's work in each micro-batch of a step, from the step plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch.distributed as dist

from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.sequence.apply import RankSlice, slice_of
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.parallel.step.feature_routing import positions_of, routes_to_slices
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan import Placement, StepPlan


def work_of(model: OmniModel, batch: StepBatch, micro_batch: int) -> MicroBatchWork:
    """Return this rank's work in the forward of a micro-batch, from the step plan."""
    layout = layout_of(model)
    sequence_slice = (
        None if layout is None else slice_of(layout.state, batch.packs[micro_batch].num_tokens, model.device)
    )
    inside = [c.name for c in batch.plan.topology.components if c.media and c.edge == "forward"]
    return _work(model, batch, micro_batch, inside, sequence_slice)


def work_of_window(model: OmniModel, batch: StepBatch, component: str, window: int) -> MicroBatchWork:
    """Return this rank's calls for the items of an encoder in a window of micro-batches.

    With the exchange of the features, unless a section encodes them and sends messages.

    Args:
        model: parallelized.
        batch: the step.
        component: an encoder that is encoded outside of the forwards.
        window: the first micro-batch of the window.
    """
    return _work(model, batch, window, [component], None)


def _work(
    model: OmniModel, batch: StepBatch, micro_batch: int, names: Sequence[str], sequence_slice: RankSlice | None
) -> MicroBatchWork:
    plan, layout = batch.plan, layout_of(model)
    together = {} if layout is None else layout.sharing
    media = {name for component in names for name in model.media_names[component]}
    calls, heads = plan.calls_and_heads(micro_batch)
    exchanged = [c for name in names if _is_exchanged(plan, c := plan.topology.component(name), micro_batch)]
    cut = {c.name for c in exchanged if sequence_slice is not None and not _needs_all(c, together)}
    groups = {} if layout is None else layout.exchanges
    return MicroBatchWork(
        calls={name: number for name, number in calls.items() if name in media},
        heads=heads,
        media_calls={
            name: [items.to(model.device) for items in drawn]
            for name, drawn in batch.media_calls[micro_batch].items()
            if name in media
        },
        exchanges={
            c.name: _exchange(batch, c, micro_batch, sequence_slice if c.name in cut else None, groups.get(c.name))
            for c in exchanged
        },
        sequence_slice=sequence_slice,
        cut=cut,
        together=together,
    )


def _is_exchanged(plan: StepPlan, component: Placement, micro_batch: int) -> bool:
    moves = component.edge != "message" and plan.topology.moves(component.name)
    return moves and plan.is_active(component.name, micro_batch)


def _needs_all(component: Placement, together: Collection[str]) -> bool:
    """Whether a rank needs the features of all tokens, where it has a slice of the sequence."""
    return component.place == "world" or component.head is not None or component.name in together


def _exchange(
    batch: StepBatch,
    component: Placement,
    micro_batch: int,
    sequence_slice: RankSlice | None,
    group: dist.ProcessGroup | None,
) -> Exchange:
    """The exchange of a component's features; ``sequence_slice``: only those of this slice come back."""
    plan, topology = batch.plan, batch.plan.topology
    rank = dist.get_rank() if dist.is_initialized() else 0
    caller = topology.caller_of(rank, component.name)
    made = [item for call in plan.calls_of(caller, component.name, micro_batch) for item in call.items]
    routes = plan.routes(component.name, micro_batch)
    if sequence_slice is not None:
        positions = positions_of(batch.packs[micro_batch], component)
        sharing = topology.data_groups[topology.group_of[caller]]
        routes, made = routes_to_slices(routes, sharing, positions, sequence_slice.split, made)
    to_stage = rank - caller
    routes = replace(routes, producer=routes.producer + to_stage, consumer=routes.consumer + to_stage)
    return Exchange(routes, group, made=made, is_differentiable=component.is_trained)
