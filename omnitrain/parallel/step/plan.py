"""Plan an optimizer step from the packs of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from omnitrain.data.loading.socket_message import as_bytes
from omnitrain.data.packing.pack import MediaBatch, Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.components.media_calls import Apart
from omnitrain.models.omni.encode import with_projector_inputs
from omnitrain.models.omni.lockstep import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.teacher import with_teacher_inputs
from omnitrain.parallel.layout import call_axes, is_separate, layout_of
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.step.item_costs import Measured, MeasuredCosts, given_costs
from omnitrain.parallel.step.media_dispatch import StepBatch, dispatch_media
from omnitrain.parallel.step.order import OrderOfRun, order_of_run
from omnitrain.parallel.step.rendezvous import DataProcessGroup, Rendezvous, open_rendezvous
from omnitrain.parallel.step.windows import window_chooser
from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    PlannedComponent,
    RankFacts,
    StepTables,
    Topology,
    decode_tables,
    encode_table,
    plan_step,
    shape_key,
)
from omnitrain.plan.item_cost import item_cost
from omnitrain.plan.topology import Place
from omnitrain.plan.wavefront.step import Drawn, rearranged
from omnitrain.plan.windows import WindowChooser
from omnitrain.recipe.parallel import FOUNDATION, MAIN

Groups = tuple[tuple[int, ...], ...]


def topology_of(model: OmniModel) -> Topology:
    """Return the description of a model and its ranks that planning needs.

    Ranks are numbered among those that plan together (:attr:`ModelLayout.planned_ranks`).

    Args:
        model: parallelized by :func:`omnitrain.parallel.parallelize.build_parallelize_model`; otherwise every rank has
            a copy.

    Raises:
        UserError: not an omni model.
    """
    if not isinstance(model, OmniModel):
        raise UserError(
            f"model: found a {type(model).__name__}; expected the OmniModel that build_omni_model or "
            "build_parallelize_model returns"
        )
    layout = layout_of(model)
    planned = _planned_ranks(model)
    everyone = tuple(range(len(planned)))
    ranks = dict.fromkeys((*model.media_names, FOUNDATION), everyone)
    trained = {name: model.has_backward(name) for name in model.components}
    copies = {name: len(everyone) for name in trained}
    windows: dict[str, int | None] = {}
    call_elements: dict[str, int | None] = {}
    first_stage = readers = everyone
    places: dict[str, Place] = {}
    data_groups: Groups = ()
    call_groups: dict[str, Groups] = {}
    shared: set[str] = set()
    if layout is not None:
        plans = {name: component.plan for name, component in layout.components.items()}
        main, states = layout.state_of(FOUNDATION), {name: layout.state_of(name) for name in plans}
        of_sections = [state for name, state in main.sections.items() if name != MAIN]
        data_groups = tuple(group for state in (main, *of_sections) for group in _groups(state, planned, "data"))
        readers = tuple(np.searchsorted(planned, [rank for rank in planned if rank in main.ranks]).tolist())
        of_stage = main.size("stage")
        first_stage = tuple(rank % of_stage if rank in readers else rank for rank in everyone)
        for name, plan in plans.items():
            ranks[name] = readers if is_separate(plan) else readers[:of_stage]
            if states[name] is not main:
                ranks[name] = tuple(np.searchsorted(planned, states[name].ranks).tolist())
            windows[name] = 1 if plan.window is None else None if isinstance(plan.window, str) else plan.window
        call_elements = {name: plan.call_elements for name, plan in plans.items()}
        copies = {n: len(ranks[n]) // (layout.components[n].num_shards * (p.tp or 1)) for n, p in plans.items()}
        places = {name: plan.place or "local" for name, plan in plans.items() if name != FOUNDATION}
        call_groups = {
            name: tuple(
                group
                for group in _groups(layout.calling_state_of(name), planned, *call_axes(plan))
                if group[0] in ranks[name]
            )
            for name, plan in plans.items()
        }
        shared = {name for name, plan in plans.items() if (plan.ulysses or 1) > 1 or (plan.tp or 1) > 1}
    components = [
        PlannedComponent(
            name=name,
            ranks=ranks[name],
            media=model.media_names.get(name, ()),
            reads_packs=name == FOUNDATION,
            head=name if name in model.decoder_names else None,
            place=places.get(name, "local"),
            num_replicas=copies[name],
            is_trained=trained[name],
            call_groups=call_groups.get(name, ()),
            is_shared=name in shared,
            window=windows.get(name, 1),
            call_elements=call_elements.get(name),
            reads=model.reads.get(name, ""),
        )
        for name in (*model.media_names, FOUNDATION)
    ]
    losses = ("text", *model.decoder_names)
    return Topology(len(everyone), tuple(components), losses, data_groups, first_stage, readers)


def _groups(state: ParallelState, ranks: Sequence[int], *axes: str) -> Groups:
    """The groups of these ranks on the product of ``axes``, in the numbering of the plan."""
    inside = [group for group in state.groups(*axes) if group[0] in ranks]
    return tuple(tuple(np.searchsorted(ranks, group).tolist()) for group in inside)


def _planned_ranks(model: OmniModel) -> tuple[int, ...]:
    """The global ranks that plan a step together with this rank."""
    layout = layout_of(model)
    if layout is not None:
        return layout.planned_ranks
    return tuple(range(dist.get_world_size() if dist.is_initialized() else 1))


def facts_of(
    pack: Pack, apart: Mapping[str, Apart] | None = None, quadratic: Mapping[str, float] | None = None
) -> MicroBatchFacts:
    """Return the description of a pack that planning needs.

    Args:
        pack: a micro-batch.
        apart: media name -> ``items`` or ``samples``, if a call may have only one of them.
        quadratic: media name -> the quadratic part of its items' cost (:func:`~omnitrain.plan.item_cost.item_cost`).
    """
    return MicroBatchFacts(
        counts=pack.loss_counts(),
        lengths=pack.info.lengths,
        items={
            name: tuple(_items(batch, pack.info.indices, (apart or {}).get(name), (quadratic or {}).get(name, 0.0)))
            for name, batch in (*pack.inputs.items(), *pack.targets.items())
        },
    )


def _items(batch: MediaBatch, indices: Sequence[int], apart: Apart | None, quadratic: float) -> list[ItemFacts]:
    """The items in the order of the pack; their costs follow from their numbers of input elements."""
    facts: list[ItemFacts] = []
    owners = iter(batch.samples)
    for group in batch.groups:
        key = tuple((name, str(t.dtype), tuple(t.shape[1:])) for name, t in sorted(group.features.items()))
        for num_tokens, elements in zip(group.num_tokens, group.num_elements, strict=True):
            owner = next(owners)
            # Only items with equal keys share a call.
            call_key = {None: None, "samples": indices[owner], "items": (indices[owner], len(facts))}[apart]
            shape = shape_key(key, call_key)
            cost = item_cost(elements or num_tokens, quadratic)  # what a tower gives comes later, a row for each token
            facts.append(ItemFacts(num_tokens=num_tokens, cost=cost, shape=shape, elements=elements))
    return facts


class StepPlanner:
    """Plan steps in a rank's data process, where the packs are built. Picklable until the first call.

    As a context manager it connects to the planners of the other ranks on entry and disconnects on exit; a rank that
    still waits for this one then gets an error.

    Args:
        topology: the topology of the run.
        peers: the data processes of all ranks.
        apart: see :func:`facts_of`.
        ranks: global ranks, in the numbering of the topology.
        idle: a sample without supervised tokens, for ranks that have fewer packs than others.
        windows: chooses the windows of each step; None: all steps have those of the topology.
        costs: component -> the quadratic part of its items' cost.
        measured: what a run measures; None: nothing.
        order: orders the micro-batches of each step; None: each rank runs what it draws, in order.
        divided: encoders whose projectors are planned apart from their towers.
        teachers: encoders whose items are the samples themselves.
    """

    def __init__(
        self,
        topology: Topology,
        peers: DataProcessGroup,
        apart: Mapping[str, Apart] | None,
        ranks: tuple[int, ...],
        idle: Sample,
        windows: WindowChooser | None = None,
        costs: Mapping[str, float] | None = None,
        measured: MeasuredCosts | None = None,
        order: OrderOfRun | None = None,
        divided: tuple[str, ...] = (),
        teachers: tuple[str, ...] = (),
    ) -> None:
        self.topology, self.peers, self.apart, self.ranks = topology, peers, dict(apart or {}), ranks
        self.idle, self.windows, self.divided, self.teachers = idle, windows, divided, teachers
        self.costs, self.measured, self.order = dict(costs or {}), measured, order

    def __call__(self, packs: Sequence[Pack]) -> StepBatch:
        """Plan a step, and send media to the ranks that encode them; all ranks must call it.

        The ranks of a data group pass the same packs. A rank may have fewer packs than others, or none; it takes part
        in the other forwards with idle packs, from which the model learns nothing.

        Returns:
            The step. If no rank has a pack, ``plan.num_micro_batches`` is 0.

        Raises:
            UserError: ``packs`` is not a list of packs, or has more features than the plan's ``feature_bytes`` allow.
        """
        if not isinstance(packs, Sequence) or not all(isinstance(pack, Pack) for pack in packs):
            raise UserError(
                f"packs: found {_types(packs)}; expected a list of Packs, as Pack.from_samples returns them"
            )
        packs = [with_teacher_inputs(with_projector_inputs(pack, self.divided), self.teachers) for pack in packs]
        rank = self.ranks.index(self.peers.rendezvous.rank)
        measured = Measured() if self.measured is None else self.measured.next_step()
        costs = self.costs | dict(measured.quadratic)
        tables = self._tables(rank, packs, costs)
        most = len(tables.counts)
        if (tables.num_micro_batches[self.topology.owners] < most).any():
            if rank in self.topology.readers:
                packs = [*packs, *[Pack.from_samples([self.idle])] * (most - len(packs))]
            tables = self._tables(rank, packs, costs)

        rates = None
        if self.order is not None:
            rates = self.order.rates(self.topology, tables, measured.seconds, costs.get(FOUNDATION, 0.0))
        if self.order is not None and rates is not None and most > 1:
            drawn = self.order(self.topology, tables, rates)
            packs = self._rearranged(rank, packs, drawn)
            tables = rearranged(self.topology, tables, drawn)
        topology = self.topology if self.windows is None else self.windows(self.topology, tables)
        return dispatch_media(plan_step(topology, tables, rates), rank, packs, self._swap)

    def _swap(self, parcels: Sequence[bytes]) -> list[bytes]:
        """An all-to-all of parcels, in the numbering of the topology."""
        sent = dict(zip(self.ranks, parcels, strict=True))
        received = self.peers.swap([sent.get(other, b"") for other in range(self.peers.rendezvous.world_size)])
        return [received[other] for other in self.ranks]

    def _rearranged(self, rank: int, packs: Sequence[Pack], drawn: Sequence[Drawn]) -> list[Pack]:
        """The packs that this rank runs, in order; they come from the rank with the same place in its data group."""
        topology, owners = self.topology, self.topology.owners.tolist()
        if all((of_lane.lane == lane).all() for lane, of_lane in enumerate(drawn)):
            if rank not in topology.readers:
                return []
            own = drawn[owners.index(topology.owner_of(rank))]
            return [packs[index] for index in own.micro_batch.tolist()]
        parcels: list[dict[int, Pack]] = [{} for _ in range(topology.world_size)]
        if rank in topology.readers:
            first = topology.first_stage[rank]
            place = topology.data_groups[topology.group_of[first]].index(first)
            own_lane = owners.index(topology.owner_of(rank))
            for lane, of_lane in enumerate(drawn):
                receiver = topology.data_groups[topology.group_of[owners[lane]]][place] + rank - first
                for index in np.flatnonzero(of_lane.lane == own_lane).tolist():
                    parcels[receiver][index] = packs[of_lane.micro_batch[index]]
        received: dict[int, Pack] = {}
        for parcel in self._swap([as_bytes(parcel) for parcel in parcels]):
            received |= pickle.loads(parcel)
        return [received[index] for index in sorted(received)]

    def _tables(self, rank: int, packs: Sequence[Pack], costs: Mapping[str, float]) -> StepTables:
        drawn = packs if self.topology.is_owner(rank) else ()
        encoders = [component for component in self.topology.components if component.name != FOUNDATION]
        quadratic = {name: costs.get(encoder.name, 0.0) for encoder in encoders for name in encoder.media}
        facts = RankFacts(tuple(facts_of(pack, self.apart, quadratic) for pack in drawn))
        tables = self.peers.tables(encode_table(self.topology, facts))
        return decode_tables(self.topology, tables[list(self.ranks)])

    def __enter__(self) -> StepPlanner:
        """Connect before data is read; otherwise the other ranks would wait for one that fails earlier."""
        self.peers.join()
        return self

    def __exit__(self, *error: object) -> None:
        self.peers.leave()


def _types(packs: object) -> str:
    if isinstance(packs, Sequence) and not isinstance(packs, str):
        return f"a list of {', '.join(sorted({type(pack).__name__ for pack in packs}))}"
    return f"a {type(packs).__name__}"


def step_planner(
    model: OmniModel, rendezvous: Rendezvous | None = None, measured: MeasuredCosts | None = None
) -> StepPlanner:
    """Return the planner of a model's steps: call it with a rank's packs of a step to get a :class:`StepBatch`.

    Args:
        model: see :func:`topology_of`.
        rendezvous: the rendezvous of the processes that will call the planner, one per rank; None: open a new one (all
            ranks must then call this).
        measured: costs of items that a run measures; None: the model's plan alone decides them.

    Raises:
        UserError: not an omni model.
    """
    topology = topology_of(model)
    peers = DataProcessGroup(rendezvous if rendezvous is not None else open_rendezvous())
    ranks, idle = _planned_ranks(model), idle_prompt(model)
    windows, costs, order = window_chooser(model), given_costs(model), order_of_run(model)
    apart, divided = model.runner.apart, model.divided
    return StepPlanner(topology, peers, apart, ranks, idle, windows, costs, measured, order, divided, model.teachers)
