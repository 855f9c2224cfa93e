"""This rank's work in each micro-batch of a step, from the step plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from omnitrain.models.omni.encode import MicroBatchWork
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.parallel.sequence.apply import slice_of
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.parallel.step.feature_routing import positions_of, routes_to_slices
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan import PlannedComponent


def work_of(model: OmniModel, batch: StepBatch, micro_batch: int) -> MicroBatchWork:
    """Return this rank's work in a micro-batch, from the step plan."""
    plan = batch.plan
    layout = layout_of(model)
    ranks = np.array(layout.state.loss_ranks if layout is not None else range(plan.topology.world_size))
    rank = int(np.searchsorted(ranks, dist.get_rank() if dist.is_initialized() else 0))
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
                routes, made = routes_to_slices(routes, rank, positions, sequence_slice.split, made)
            routes = replace(routes, producer=ranks[routes.producer], consumer=ranks[routes.consumer])
            group = _group_of(layout, component)
            exchanges[component.name] = Exchange(routes, group, made=made, is_differentiable=component.is_trained)
    media_calls = {
        name: [items.to(model.device) for items in drawn] for name, drawn in batch.media_calls[micro_batch].items()
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
