"""This rank's work in a step, from the step plan: of a forward, of a component, and the exchange of its features."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.encode import own_calls
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.sequence.apply import RankSlice, slice_of
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.parallel.step.feature_routing import positions_of, routes_to_slices
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan import Placement


def encoded_pack(model: OmniModel, batch: StepBatch, micro_batch: int, pack: Pack) -> EncodedPack:
    """Return this rank's part in the forward of a micro-batch, without the features that it reads."""
    _, heads = batch.plan.calls_and_heads(micro_batch)
    own = slice_in(model, batch, micro_batch)
    return EncodedPack(pack, sequence_slice=own, heads=heads, apart=batch.plan.topology.heads_apart)


def slice_in(model: OmniModel, batch: StepBatch, micro_batch: int) -> RankSlice | None:
    """Return the slice of a micro-batch's sequence on this rank; None: all of it."""
    layout = layout_of(model)
    if layout is None or not batch.packs or not batch.is_sliced:
        return None
    return slice_of(layout.state, batch.packs[micro_batch].num_tokens, model.device)


def calls_in(
    model: OmniModel, batch: StepBatch, component: str, window: int, pack: Pack | None = None
) -> tuple[dict[str, list[MediaGroup]], dict[str, int]]:
    """Return this rank's calls for the items of a component in a window of micro-batches.

    Args:
        model: parallelized, or on one process.
        batch: the step.
        component: name of an encoder or decoder.
        window: the first micro-batch of the window.
        pack: this rank's pack, on the model's device, whose items it encodes where the step does not name them.

    Returns:
        Name -> the items of each call, and name -> the number of calls on every rank of the component.
    """
    names, drawn = model.media_names[component], batch.media_calls[window]
    numbers, _ = batch.plan.calls_and_heads(window)
    items = {
        name: [group.to(model.device) for group in drawn[name]]
        if name in drawn or pack is None
        else own_calls(model, pack, name)
        for name in names
    }
    return items, {name: numbers[name] for name in names}


def exchange_in(model: OmniModel, batch: StepBatch, placement: Placement, window: int) -> Exchange | None:
    """Return the exchange of a component's features in a window; None: each rank encodes what it reads."""
    plan, layout = batch.plan, layout_of(model)
    topology = plan.topology
    if not topology.moves(placement.name):
        return None
    rank = dist.get_rank() if dist.is_initialized() else 0
    caller = topology.caller_of(rank, placement.name)
    made = [item for call in plan.calls_of(caller, placement.name, window) for item in call.items]
    routes = plan.routes(placement.name, window)
    if (share := _slice_read(model, batch, placement, window)) is not None:
        positions = positions_of(batch.packs[window], placement)
        sharing = topology.data_groups[topology.group_of[caller]]
        routes, made = routes_to_slices(routes, sharing, positions, share.split, made)
    to_stage = rank - caller
    routes = replace(routes, producer=routes.producer + to_stage, consumer=routes.consumer + to_stage)
    return Exchange(routes, None if layout is None else layout.exchanges.get(placement.name), made=made)


def _slice_read(model: OmniModel, batch: StepBatch, placement: Placement, window: int) -> RankSlice | None:
    """Return the slice for whose tokens alone this rank reads a component's features of a window; None: for all."""
    layout = layout_of(model)
    is_shared = layout is not None and (layout.components[placement.name].plan.ulysses or 1) > 1
    needs_all = placement.edge != "forward" or placement.place == "world" or placement.head is not None or is_shared
    return None if needs_all or not batch.plan.topology.moves(placement.name) else slice_in(model, batch, window)
