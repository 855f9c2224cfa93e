"""This rank's work in each micro-batch of a step, from the step plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import ModelLayout, call_axes, layout_of
from omnitrain.parallel.sequence.apply import slice_of
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.parallel.step.feature_routing import positions_of, routes_to_slices
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan import PlannedComponent


def work_of(model: OmniModel, batch: StepBatch, micro_batch: int) -> MicroBatchWork:
    """Return this rank's work in a micro-batch, from the step plan."""
    plan = batch.plan
    layout = layout_of(model)
    ranks = np.array(layout.state.stage_ranks if layout is not None else range(plan.topology.world_size))
    rank = int(np.searchsorted(ranks, dist.get_rank() if dist.is_initialized() else 0))
    calls, heads, exchanges, cut = {}, set(), {}, set()
    sequence_slice = (
        None if layout is None else slice_of(layout.state, batch.packs[micro_batch].num_tokens, model.device)
    )
    towers = {} if layout is None else {name: found.tower for name, found in layout.components.items()}
    together = {name: tower.sharing for name, tower in towers.items() if tower is not None}
    for call_site, number in zip(plan.topology.call_sites, plan.calls[micro_batch].tolist(), strict=True):
        if call_site.kind == "encode":
            calls[call_site.name] = number
        elif call_site.kind == "head" and number:
            heads.add(call_site.name)
    for component in plan.topology.components:
        if plan.topology.moves(component.name) and plan.is_active(component.name, micro_batch):
            made = [item for call in plan.calls_of(rank, component.name, micro_batch) for item in call.items]
            routes = plan.routes(component.name, micro_batch)
            is_whole = component.place == "world" or component.head is not None or component.name in together
            if sequence_slice is not None and not is_whole:
                cut.add(component.name)
                positions = positions_of(batch.packs[micro_batch], component)
                group = plan.topology.data_groups[plan.topology.group_of[rank]]
                routes, made = routes_to_slices(routes, group, positions, sequence_slice.split, made)
            routes = replace(routes, producer=ranks[routes.producer], consumer=ranks[routes.consumer])
            exchanges[component.name] = Exchange(
                routes, _group_of(layout, component), made=made, is_differentiable=component.is_trained
            )
    media_calls = {
        name: [items.to(model.device) for items in drawn] for name, drawn in batch.media_calls[micro_batch].items()
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


def _group_of(layout: ModelLayout | None, component: PlannedComponent) -> dist.ProcessGroup | None:
    """Return the ranks that exchange the component's features; of ranks that make a call together, one."""
    if layout is None:
        return None
    state, together = layout.state, call_axes(layout.components[component.name].plan)
    if "sequence" in together:
        return state.tp_group
    if "tp" in together:
        return state.loss_group if component.place == "world" else state.sequence_group
    return state.stage_group if component.place == "world" else state.data_group
