"""Send media to the ranks that encode them, before a step."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnitrain.data.loading.data_process import as_bytes
from omnitrain.data.packing.pack import MediaBatch, MediaGroup, Pack
from omnitrain.models.components.outputs import media_calls
from omnitrain.plan import StepPlan

Swap = Callable[[Sequence[bytes]], list[bytes]]
MediaCallsByName = Mapping[str, tuple[MediaGroup, ...]]


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank."""

    packs: tuple[Pack, ...]  # its micro-batches; none on ranks that only encode for others
    plan: StepPlan  # the plan of all ranks
    # for each micro-batch, media name -> the items of each call that this rank makes. Media without an entry: the calls
    # of the rank's pack.
    media_calls: tuple[MediaCallsByName, ...]
    is_sliced: bool = True  # whether the ranks of a sequence group divide the tokens of a pack


def dispatch_media(plan: StepPlan, rank: int, packs: Sequence[Pack], swap: Swap) -> StepBatch:
    """Return the step of a rank: with media that it encodes for others, without media that others encode for it.

    Args:
        plan: of the step.
        rank: in the numbering of the plan.
        packs: of the rank; equal on the ranks of a data group.
        swap: an all-to-all of parcels; called by all ranks or by none.
    """
    topology = plan.topology
    moving = [component.name for component in topology.components if topology.moves(component.name)]
    component_of = {name: component for component in moving for name in topology.component(component).media}
    if not component_of:
        return StepBatch(tuple(packs), plan, tuple({} for _ in range(plan.num_micro_batches)))
    items, parcels = _kept_and_sent(plan, rank, packs, component_of)
    for parcel in swap([as_bytes(parcel) for parcel in parcels]):
        items |= pickle.loads(parcel)
    names = set(component_of)
    calls = tuple(
        dict.fromkeys(names, ()) | _calls(plan, rank, moving, micro_batch, items)
        for micro_batch in range(plan.num_micro_batches)
    )
    return StepBatch(tuple(_without_features(pack, names) for pack in packs), plan, calls)


def _kept_and_sent(
    plan: StepPlan, rank: int, packs: Sequence[Pack], component_of: Mapping[str, str]
) -> tuple[dict[int, MediaGroup], list[dict[int, MediaGroup]]]:
    """The items of the rank's packs, by index: those that it encodes, and those for each other rank."""
    topology = plan.topology
    kept: dict[int, MediaGroup] = {}
    sent: list[dict[int, MediaGroup]] = [{} for _ in range(topology.world_size)]
    for index, name, item in _drawn_items(plan, rank, packs):
        if name not in component_of:
            continue
        caller = topology.caller_of(rank, component_of[name])
        makers = topology.call_group_of(component_of[name])[plan.producer[index]]
        if caller in makers:
            kept[index] = item
        elif topology.is_owner(caller):
            for maker in makers:
                if topology.owner_of(maker) != topology.owner_of(rank):  # the others hold the sample, too
                    sent[maker + rank - caller][index] = item
    return kept, sent


def _drawn_items(plan: StepPlan, rank: int, packs: Sequence[Pack]) -> Iterator[tuple[int, str, MediaGroup]]:
    """Index, media name, and a group with only this item, for all items of the samples that the rank holds."""
    indices = iter(np.flatnonzero(plan.owner == plan.topology.owner_of(rank)).tolist())
    for pack in packs:
        batches = {**pack.inputs, **pack.targets}
        for name in plan.topology.media:
            for item in media_calls(batches[name], apart="items") if name in batches else ():
                yield next(indices), name, item


def _calls(
    plan: StepPlan, rank: int, components: Sequence[str], micro_batch: int, items: Mapping[int, MediaGroup]
) -> dict[str, tuple[MediaGroup, ...]]:
    calls: dict[str, list[MediaGroup]] = {}
    for component in components:
        for call in plan.calls_of(plan.topology.caller_of(rank, component), component, micro_batch):
            if call.items:
                name = plan.topology.call_sites[call.call_site].name
                calls.setdefault(name, []).append(_one_group([items[index] for index in call.items]))
    return {name: tuple(of_media) for name, of_media in calls.items()}


def _one_group(groups: Sequence[MediaGroup]) -> MediaGroup:
    """Concatenate items with equal shapes, for one call."""
    return MediaGroup(
        features={name: torch.cat([group.features[name] for group in groups]) for name in groups[0].features},
        num_rows={name: tuple(n for group in groups for n in group.num_rows[name]) for name in groups[0].num_rows},
        num_tokens=tuple(count for group in groups for count in group.num_tokens),
        samples=tuple(sample for group in groups for sample in group.samples),
    )


def _without_features(pack: Pack, names: set[str]) -> Pack:
    def stripped(batch: MediaBatch) -> MediaBatch:
        groups = (dataclasses.replace(group, features={}, num_rows={}) for group in batch.groups)
        return dataclasses.replace(batch, groups=tuple(groups))

    def strip(batches: Mapping[str, MediaBatch]) -> dict[str, MediaBatch]:
        return {name: stripped(batch) if name in names else batch for name, batch in batches.items()}

    return dataclasses.replace(pack, inputs=strip(pack.inputs), targets=strip(pack.targets))
