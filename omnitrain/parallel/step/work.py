"""This rank's work in each micro-batch of a step, from the step plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.sequence.apply import RankSlice, slice_of
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.parallel.step.feature_routing import positions_of, routes_to_slices
from omnitrain.parallel.step.media_dispatch import StepBatch


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
    topology, rank = plan.topology, dist.get_rank() if dist.is_initialized() else 0
    calls, heads, exchanges, cut = {}, set(), {}, set()
    towers = {} if layout is None else {name: found.tower for name, found in layout.components.items()}
    together = {name: tower.sharing for name, tower in towers.items() if tower is not None}
    media = {name for component in names for name in model.media_names[component]}
    for call_site, number in zip(topology.call_sites, plan.calls[micro_batch].tolist(), strict=True):
        if call_site.kind == "encode" and call_site.name in media:
            calls[call_site.name] = number
        elif call_site.kind == "head" and number:
            heads.add(call_site.name)
    for component in (topology.component(name) for name in names):
        moves = topology.moves(component.name) and component.edge != "message"
        if moves and plan.is_active(component.name, micro_batch):
            caller = topology.caller_of(rank, component.name)
            made = [item for call in plan.calls_of(caller, component.name, micro_batch) for item in call.items]
            routes = plan.routes(component.name, micro_batch)
            is_whole = component.place == "world" or component.head is not None or component.name in together
            if sequence_slice is not None and not is_whole:
                cut.add(component.name)
                positions = positions_of(batch.packs[micro_batch], component)
                group = topology.data_groups[topology.group_of[caller]]
                routes, made = routes_to_slices(routes, group, positions, sequence_slice.split, made)
            to_stage = rank - caller
            routes = replace(routes, producer=routes.producer + to_stage, consumer=routes.consumer + to_stage)
            exchanges[component.name] = Exchange(
                routes,
                None if layout is None else layout.exchanges[component.name],
                made=made,
                is_differentiable=component.is_trained,
            )
    media_calls = {
        name: [items.to(model.device) for items in drawn]
        for name, drawn in batch.media_calls[micro_batch].items()
        if name in media
    }
    return MicroBatchWork(
        calls=calls,
        heads=heads,
        media_calls=media_calls,
        exchanges=exchanges,
        sequence_slice=sequence_slice,
        cut=cut,
        together=together,
    )
