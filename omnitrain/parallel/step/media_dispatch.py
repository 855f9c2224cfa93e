"""Media on their way to the ranks that encode them, before a step."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnitrain.data.message import as_bytes
from omnitrain.data.pack import MediaBatch, MediaGroup, Pack
from omnitrain.models.components.media_calls import MediaCall, media_calls
from omnitrain.plan import StepPlan

Swap = Callable[[Sequence[bytes]], list[bytes]]
MediaCallsByName = Mapping[str, tuple[MediaCall, ...]]


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank.

    Attributes:
        packs: its micro-batches.
        plan: of all ranks.
        media_calls: for each micro-batch, name of media -> the calls that this rank makes; absent: those of its own
            pack.
    """

    packs: tuple[Pack, ...]
    plan: StepPlan
    media_calls: tuple[MediaCallsByName, ...]


def dispatch_media(plan: StepPlan, rank: int, packs: Sequence[Pack], swap: Swap) -> StepBatch:
    """The step of a rank, with what it encodes for others and without what others encode for it.

    Args:
        plan: of the step.
        rank: this one, as the plan counts.
        packs: its own; those of ranks that share their samples are the same.
        swap: sends the r-th of some parcels to rank r, and returns what each rank sent; called by all or by none.
    """
    moving = [component.name for component in plan.topology.components if plan.topology.moves(component.name)]
    ports = {plan.topology.ports[port].name for name in moving for port in plan.topology.ports_of(name)}
    if not ports:
        return StepBatch(tuple(packs), plan, tuple({} for _ in packs))
    parcels: list[dict[int, MediaCall]] = [{} for _ in range(plan.topology.world_size)]
    for number, name, item in _own_items(plan, rank, packs):
        if name in ports:
            parcels[plan.producer[number]][number] = item
    received = swap([as_bytes(parcel) for parcel in parcels])
    items = {number: item for parcel in received for number, item in pickle.loads(parcel).items()}
    work = tuple(
        dict.fromkeys(ports, ()) | _work(plan, rank, moving, micro_batch, items) for micro_batch in range(len(packs))
    )
    return StepBatch(tuple(_without_features(pack, ports) for pack in packs), plan, work)


def _own_items(plan: StepPlan, rank: int, packs: Sequence[Pack]) -> Iterator[tuple[int, str, MediaCall]]:
    """Number, name of media, and the item as a call of its own, of all items that the rank owns."""
    numbers = iter(np.flatnonzero(plan.owner == rank).tolist())
    for pack in packs if plan.topology.is_owner(rank) else ():
        batches = {**pack.inputs, **pack.targets}
        for port in plan.topology.ports:
            if port.name in batches:
                yield from ((next(numbers), port.name, item) for item in _apart(batches[port.name], pack))


def _apart(batch: MediaBatch, pack: Pack) -> Iterator[MediaCall]:
    for call in media_calls(batch, pack.info.ids):
        for item, sample in zip(call.items.split([1] * len(call.samples)), call.samples, strict=True):
            yield MediaCall(item, (sample,))


def _work(
    plan: StepPlan, rank: int, components: Sequence[str], micro_batch: int, items: Mapping[int, MediaCall]
) -> dict[str, tuple[MediaCall, ...]]:
    calls = [call for name in components for call in plan.calls_of(rank, name, micro_batch)]
    work: dict[str, list[MediaCall]] = {}
    for call in calls:
        if call.items:
            name = plan.topology.call_sites[call.call_site].name
            work.setdefault(name, []).append(_one_call([items[number] for number in call.items]))
    return {name: tuple(made) for name, made in work.items()}


def _one_call(items: Sequence[MediaCall]) -> MediaCall:
    """Items that stack, as one call."""
    groups = [item.items for item in items]
    return MediaCall(
        MediaGroup(
            features={name: torch.cat([group.features[name] for group in groups]) for name in groups[0].features},
            num_rows={name: tuple(n for group in groups for n in group.num_rows[name]) for name in groups[0].num_rows},
            num_tokens=tuple(count for group in groups for count in group.num_tokens),
        ),
        tuple(sample for item in items for sample in item.samples),
    )


def _without_features(pack: Pack, ports: set[str]) -> Pack:
    def bare(batch: MediaBatch) -> MediaBatch:
        return dataclasses.replace(batch, groups=tuple(MediaGroup({}, {}, group.num_tokens) for group in batch.groups))

    def left(batches: Mapping[str, MediaBatch]) -> dict[str, MediaBatch]:
        return {name: bare(batch) if name in ports else batch for name, batch in batches.items()}

    return dataclasses.replace(pack, inputs=left(pack.inputs), targets=left(pack.targets))
