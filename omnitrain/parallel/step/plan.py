"""From what every rank drew for an optimizer step to the plan that all of them follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from omnitrain.data.pack import MediaBatch, Pack
from omnitrain.data.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.components.media_calls import Apart
from omnitrain.models.omni.lockstep import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.media_dispatch import StepBatch, dispatch_media
from omnitrain.parallel.step.rendezvous import DataProcessGroup, Rendezvous, open_rendezvous
from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    PlannedComponent,
    Port,
    RankFacts,
    StepTables,
    Topology,
    decode_tables,
    encode_table,
    plan_step,
    shape_key,
)
from omnitrain.plan.topology import Place
from omnitrain.recipe.parallel import FOUNDATION


def topology_of(model: OmniModel, places: Mapping[str, Place] | None) -> Topology:
    """What planning must know of a model and of the ranks it lies on.

    Ranks are counted among those over which losses add up (:attr:`ParallelState.loss_ranks`): tensor parallel peers
    do the same, each in a group of its own.

    Args:
        model: as :func:`omnitrain.parallel.parallelize.build_parallelize_model` laid it out; else a copy on every rank.
        places: component -> who encodes its items; absent: as its plan says, or the rank that drew them.
    """
    if not isinstance(model, OmniModel):
        raise UserError(
            f"model: found a {type(model).__name__}; expected what build_omni_model or build_parallelize_model returns"
        )
    layout = layout_of(model)
    everyone = tuple(range(len(_planned_ranks(model))))
    trained = {name: any(p.requires_grad for p in own.values()) for name, own in model.components.items()}
    copies = {name: len(everyone) for name in trained}
    planned: dict[str, Place] = {}
    data_groups: tuple[tuple[int, ...], ...] = ()
    if layout is not None:
        data_groups = _runs(len(everyone), layout.state.size("sequence"))
        copies = {name: component.num_replicas for name, component in layout.components.items()}
        planned = {name: component.plan.place or "local" for name, component in layout.components.items()}
    planned |= places or {}
    components = [
        PlannedComponent(
            name=name,
            ranks=everyone,
            ports=tuple(Port(port) for port in model.ports.get(name, ())),
            reads_packs=name == FOUNDATION,
            head=name if name in model.decoder_names else None,
            place=planned.get(name, "local"),
            num_replicas=copies[name],
            is_trained=trained[name],
            is_shared=layout is not None and layout.components[name].tower is not None,
        )
        for name in (*model.ports, FOUNDATION)
    ]
    return Topology(len(everyone), tuple(components), ("text", *model.decoder_names), data_groups)


def _planned_ranks(model: OmniModel) -> tuple[int, ...]:
    """The global ranks that plan a step together, this one among them."""
    layout = layout_of(model)
    if layout is not None:
        return layout.state.loss_ranks
    return tuple(range(dist.get_world_size() if dist.is_initialized() else 1))


def _runs(number: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Ranks that share a sequence are neighbours among those over which losses add up."""
    return tuple(tuple(range(first, first + length)) for first in range(0, number, length))


def facts_of(pack: Pack, apart: Mapping[str, Apart] | None = None) -> MicroBatchFacts:
    """What planning must know of a pack.

    Args:
        pack: a micro-batch.
        apart: names of media -> what no call may have two of.
    """
    return MicroBatchFacts(
        counts=pack.loss_counts(),
        lengths=pack.info.lengths,
        items={
            name: tuple(_items(batch, pack.info.indices, (apart or {}).get(name)))
            for name, batch in (*pack.inputs.items(), *pack.targets.items())
        },
    )


def _items(batch: MediaBatch, indices: Sequence[int], apart: Apart | None) -> list[ItemFacts]:
    """In the order in which the pack needs their rows; an item costs as much as it has numbers."""
    facts: list[ItemFacts] = []
    owners = iter(batch.samples)
    for group in batch.groups:
        key = tuple((name, str(t.dtype), tuple(t.shape[1:])) for name, t in sorted(group.features.items()))
        per_row = {name: tensor[:1].numel() for name, tensor in group.features.items()}
        for place, rows in enumerate(group.num_tokens):
            owner = next(owners)
            cost = sum(counts[place] * per_row[name] for name, counts in group.num_rows.items())
            mates = {None: None, "samples": indices[owner], "items": (indices[owner], len(facts))}[apart]
            shape = shape_key(key, mates)
            facts.append(ItemFacts(rows=rows, cost=cost, shape=shape))
    return facts


class StepPlanner:
    """Plans steps where their packs are made: in a rank's data process. Can be pickled until it is first called.

    As a context it meets the other ranks' at once, and leaves them at the end: those that wait for it get an error.

    Args:
        topology: of the run.
        peers: the data processes of all ranks.
        apart: see :func:`facts_of`.
        ranks: global rank of each that the topology counts.
        idle: a sample with nothing to predict, for ranks that have fewer packs than others.
    """

    def __init__(
        self,
        topology: Topology,
        peers: DataProcessGroup,
        apart: Mapping[str, Apart] | None,
        ranks: tuple[int, ...],
        idle: Sample,
    ) -> None:
        self.topology, self.peers, self.apart, self.ranks = topology, peers, dict(apart or {}), ranks
        self.idle = idle

    def __call__(self, packs: Sequence[Pack]) -> StepBatch:
        """Plan the step of these packs, and bring media to the ranks that encode them; every rank calls it.

        Ranks that share their samples pass the same packs. Others may have fewer, or none: these take part in the
        forwards of the rest with a pack from which nothing is learnt.

        Returns:
            The step. Where no rank has a pack any more, ``plan.num_micro_batches`` is 0.

        Raises:
            UserError: something else than packs.
        """
        if not isinstance(packs, Sequence) or not all(isinstance(pack, Pack) for pack in packs):
            raise UserError(f"packs: found {_kinds(packs)}; expected a list of Packs, as Pack.from_samples makes them")
        rank = self.ranks.index(self.peers.rendezvous.rank)
        tables = self._tables(rank, packs)
        most = len(tables.counts)
        if any(tables.num_micro_batches[group[0]] < most for group in self.topology.data_groups):
            packs = [*packs, *[Pack.from_samples([self.idle])] * (most - len(packs))]
            tables = self._tables(rank, packs)
        return dispatch_media(plan_step(self.topology, tables), rank, packs, self._swap)

    def _tables(self, rank: int, packs: Sequence[Pack]) -> StepTables:
        drawn = packs if self.topology.is_owner(rank) else ()
        facts = RankFacts(tuple(facts_of(pack, self.apart) for pack in drawn))
        tables = self.peers.tables(encode_table(self.topology, facts))
        return decode_tables(self.topology, [tables[number] for number in self.ranks])

    def _swap(self, parcels: Sequence[bytes]) -> list[bytes]:
        sent = dict(zip(self.ranks, parcels, strict=True))
        received = self.peers.swap([sent.get(number, b"") for number in range(self.peers.rendezvous.world_size)])
        return [received[number] for number in self.ranks]

    def __enter__(self) -> StepPlanner:
        """Meet the others before a row is read: who fails before would be waited for."""
        self.peers.join()
        return self

    def __exit__(self, *error: object) -> None:
        self.peers.leave()


def _kinds(packs: object) -> str:
    """What was passed in the place of packs."""
    if isinstance(packs, Sequence) and not isinstance(packs, str):
        return f"a list of {', '.join(sorted({type(pack).__name__ for pack in packs}))}"
    return f"a {type(packs).__name__}"


def step_planner(
    model: OmniModel, rendezvous: Rendezvous | None = None, places: Mapping[str, Place] | None = None
) -> StepPlanner:
    """What plans the steps of a model: called with a rank's packs of a step, it returns its :class:`StepBatch`.

    Args:
        model: see :func:`topology_of`.
        rendezvous: of the processes that will call it, one per rank; None: a new one (all ranks must call this).
        places: see :func:`topology_of`.

    Raises:
        UserError: not an omni model.
    """
    peers = DataProcessGroup(rendezvous if rendezvous is not None else open_rendezvous())
    return StepPlanner(topology_of(model, places), peers, model.runner.apart, _planned_ranks(model), idle_prompt(model))
