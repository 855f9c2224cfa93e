"""Plan an optimizer step from the packs of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from omnitrain.data.loading.data_process import as_bytes
from omnitrain.data.packing.pack import MediaBatch, Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.components.outputs import Apart
from omnitrain.models.omni.encode import idle_prompt, with_all_inputs
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.placement import place_copies
from omnitrain.parallel.step.item_costs import Measured, MeasuredCosts, given_costs
from omnitrain.parallel.step.media_dispatch import StepBatch, dispatch_media
from omnitrain.parallel.step.order import OrderOfRun, order_of_run
from omnitrain.parallel.step.rendezvous import DataProcessGroup, Rendezvous, open_rendezvous
from omnitrain.parallel.step.windows import window_chooser
from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    StepTables,
    Topology,
    decode_tables,
    encode_table,
    plan_step,
    shape_key,
)
from omnitrain.plan.item_cost import item_cost
from omnitrain.plan.wavefront.step import MicroBatchOrder, rearranged
from omnitrain.plan.windows import WindowChooser
from omnitrain.recipe.parallel import FOUNDATION


def topology_of(model: OmniModel) -> Topology:
    """Return the placements of a model's components; of one that is not parallelized, every rank has a copy.

    Raises:
        UserError: not an omni model.
    """
    if not isinstance(model, OmniModel):
        raise UserError(
            f"model: found a {type(model).__name__}; expected the OmniModel that build_omni_model or "
            "build_parallelize_model returns"
        )
    layout = layout_of(model)
    if layout is not None:
        return layout.topology
    return place_copies(model, dist.get_world_size() if dist.is_initialized() else 1)


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
            facts.append(ItemFacts(num_tokens, cost, shape, elements, together=apart == "samples"))
    return facts


@dataclass(eq=False)
class StepPlanner:
    """Plan steps in a rank's data process, where the packs are built. Picklable until the first call.

    As a context manager it connects to the planners of the other ranks on entry and disconnects on exit; a rank that
    still waits for this one then gets an error.
    """

    topology: Topology  # of the run
    peers: DataProcessGroup  # the data processes of all ranks
    apart: Mapping[str, Apart] | None  # see :func:`facts_of`
    idle: Sample  # without supervised tokens, for ranks that have fewer packs than others
    windows: WindowChooser | None = None  # chooses the windows of each step; None: all have those of the topology
    costs: Mapping[str, float] = field(default_factory=dict)  # component -> the quadratic part of its items' cost
    measured: MeasuredCosts | None = None  # what a run measures
    order: OrderOfRun | None = None  # of the micro-batches of each step; None: each rank runs what it draws, in order
    reorders: bool = True  # whether micro-batches may change their order and their rank
    divided: tuple[str, ...] = ()  # encoders whose projectors are planned apart from their towers
    # encoder whose items are the samples themselves -> the sources of these; None: all
    teachers: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)

    def __call__(self, packs: Sequence[Pack]) -> StepBatch:
        """Plan a step, and send media to the ranks that encode them; all ranks must call it.

        The ranks of a data group pass the same packs. A rank may have fewer packs than others, or none; it takes part
        in the other forwards with idle packs, from which the model learns nothing.

        Returns:
            The step. If no rank has a pack, ``plan.num_micro_batches`` is 0.

        Raises:
            UserError: ``packs`` is not a list of packs, or has more features than ``encode.feature_bytes`` allow.
        """
        if not isinstance(packs, Sequence) or not all(isinstance(pack, Pack) for pack in packs):
            raise UserError(
                f"packs: found {_types(packs)}; expected a list of Packs, as Pack.from_samples returns them"
            )
        packs = [with_all_inputs(pack, self.divided, self.teachers) for pack in packs]
        rank = self.peers.rendezvous.rank
        measured = Measured() if self.measured is None else self.measured.next_step()
        costs = {**self.costs, **measured.quadratic}
        tables = self._tables(rank, packs, costs)
        most = len(tables.counts)
        if (tables.num_drawn[self.topology.owners] < most).any():
            if rank in self.topology.readers:
                packs = [*packs, *[Pack.from_samples([self.idle])] * (most - len(packs))]
            tables = self._tables(rank, packs, costs)

        rates = None
        if self.order is not None:
            rates = self.order.rates(self.topology, tables, measured.seconds, costs.get(FOUNDATION, 0.0))
        if self.order is not None and rates is not None and most > 1 and self.reorders:
            drawn = self.order.order(self.topology, tables, rates)
            packs = self._rearranged(rank, packs, drawn)
            tables = rearranged(self.topology, tables, drawn)
        topology = self.topology if self.windows is None else self.windows(self.topology, tables)
        return dispatch_media(plan_step(topology, tables, rates), rank, packs, self.peers.swap)

    def _rearranged(self, rank: int, packs: Sequence[Pack], drawn: Sequence[MicroBatchOrder]) -> list[Pack]:
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
        for parcel in self.peers.swap([as_bytes(parcel) for parcel in parcels]):
            received |= pickle.loads(parcel)
        return [received[index] for index in sorted(received)]

    def _tables(self, rank: int, packs: Sequence[Pack], costs: Mapping[str, float]) -> StepTables:
        drawn = packs if self.topology.is_owner(rank) else ()
        encoders = [component for component in self.topology.components if component.name != FOUNDATION]
        quadratic = {name: costs.get(encoder.name, 0.0) for encoder in encoders for name in encoder.media}
        facts = tuple(facts_of(pack, self.apart, quadratic) for pack in drawn)
        return decode_tables(self.topology, self.peers.tables(encode_table(self.topology, facts)))

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
    return StepPlanner(
        topology=topology_of(model),
        peers=DataProcessGroup(rendezvous or open_rendezvous()),
        apart=dict(model.runner.apart),
        idle=idle_prompt(model),
        windows=window_chooser(model),
        costs=given_costs(model),
        measured=measured,
        order=order_of_run(model),
        divided=model.divided,
        teachers=model.teachers,
    )
