"""``StepPlan``: the work of each rank in one optimizer step. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from omnitrain.plan.balance import assign_by_cost
from omnitrain.plan.placement import Placement, Topology
from omnitrain.plan.ragged import ranges, runs_within
from omnitrain.plan.schedule.actions import Schedule
from omnitrain.plan.schedule.table import table_of
from omnitrain.plan.tables import StepTables


@dataclass(frozen=True)
class Call:
    """One call of a component on one rank."""

    call_site: int  # index in ``topology.call_sites``
    index: int  # index among the calls at this call site in this micro-batch
    # items to encode, in this order. Empty for a forward or head, and for an ``encode`` call for which this rank has no
    # items and runs the component's minimal input
    items: tuple[int, ...]


@dataclass(frozen=True)
class Rates:
    """How long a step's work takes, in seconds or in any other unit."""

    per_token: float  # forward and backward of a token in the ranks that read packs; of a pipeline, on its first stage
    per_cost: Mapping[str, float]  # component -> forward of an item on one rank, per unit of its cost
    # the part of attention in a sample's time, relative to the linear part: a sample of n tokens takes ``per_token * (n
    # + quadratic * n ** 2)``
    quadratic: float = 0.0

    def of_packs(self, tokens: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Return how long packs take, from the sums of the lengths of their samples, and of the squares of these."""
        return self.per_token * (tokens + self.quadratic * squares)


@dataclass(frozen=True)
class RowRoutes:
    """The routes of items from producers to consumers, sorted by consumer, then by the order of items in its pack."""

    item: np.ndarray  # ``[routes]`` int64
    producer: np.ndarray  # ``[routes]`` int64, rank that encodes the item
    # ``[routes]`` int64, rank whose sequence contains the item's features, or that calls what reads them
    consumer: np.ndarray
    rows: np.ndarray  # ``[routes]`` int64, rows of the item's features


class Balance(NamedTuple):
    """How the cost of an encoder is divided among its ranks in a step."""

    items: int  # number of items
    moved: int  # number of items that a rank encodes which did not draw them
    # cost on the busiest rank of each window (the others wait for it) divided by the mean, if each rank encoded the
    # items that it drew
    imbalance_drawn: float
    imbalance: float  # the same with this plan


@dataclass(frozen=True, eq=False)
class StepPlan(StepTables):
    """Everything the ranks decide together for one optimizer step: the draws, and the work of each rank.

    ``M``: number of micro-batches; a rank that drew fewer runs empty ones; ``E``: number of call sites.
    """

    topology: Topology  # components and ranks of the run
    calls: np.ndarray  # ``[M, E]`` int64, calls at each call site; the same on all ranks of its component
    # ``[M, E, ranks]`` int64, calls for which a rank has data. Its other calls get minimal input
    calls_with_data: np.ndarray
    producer: np.ndarray  # ``[items]`` int64, rank that encodes it: the first one of the call group that does
    work: np.ndarray  # ``[items]`` int64, all items sorted by slot, producer and call
    call: np.ndarray  # ``[items]`` int64, in the order of ``work``: index of the call within its slot and producer
    work_cell: np.ndarray  # ``[items]`` int64, ascending, in the order of ``work``: ``slot * ranks + producer``
    rates: Rates | None  # with sections, how long the work takes, from which its schedule follows; else None

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of every rank."""
        return len(self.counts)

    @cached_property
    def schedule(self) -> Schedule:
        """The actions of each pipeline rank in this step, without those of sections."""
        return table_of(self.topology.pipeline, self.num_micro_batches, self.topology.components)

    @cached_property
    def loss_counts(self) -> dict[str, int]:
        """Loss name -> predicted tokens of the whole step, by which that loss is divided."""
        return dict(zip(self.topology.losses, self.counts.sum(axis=(0, 2)).tolist(), strict=True))

    def rows_of(self, component: str) -> int:
        """Return the number of features of a component's items in the whole step."""
        return int(self.item_tokens[self.topology.items_of(component, self.slot)].sum())

    def is_active(self, component: str, micro_batch: int) -> bool:
        """Whether the component runs in this micro-batch. If it does, all of its ranks call it."""
        return bool(self.calls[micro_batch, list(self.topology.call_sites_of(component))].any())

    def last_active(self, component: str) -> int | None:
        """Return the last micro-batch in which the component runs and reduces across replicas, or None."""
        return max((k for k in range(self.num_micro_batches) if self.is_active(component, k)), default=None)

    def calls_and_heads(self, micro_batch: int) -> tuple[dict[str, int], set[str]]:
        """Return media -> the calls of each rank in a micro-batch, and the losses whose heads run in it."""
        numbers = list(zip(self.topology.call_sites, self.calls[micro_batch].tolist(), strict=True))
        calls = {site.name: number for site, number in numbers if site.kind == "encode"}
        return calls, {site.name for site, number in numbers if site.kind == "head" and number}

    def calls_of(self, rank: int, component: str, micro_batch: int) -> tuple[Call, ...]:
        """Return the calls that a rank makes to the component in a micro-batch, in order."""
        if rank not in self.topology.component(component).ranks:
            return ()
        calls, producer = [], int(self.topology.call_group_of(component)[rank, 0])
        for call_site in self.topology.call_sites_of(component):
            num_with_data = int(self.calls_with_data[micro_batch, call_site, rank])
            items = self._items_by_call(producer, micro_batch, call_site, num_with_data)
            items += [()] * (int(self.calls[micro_batch, call_site]) - num_with_data)
            calls += [Call(call_site, index, call_items) for index, call_items in enumerate(items)]
        return tuple(calls)

    def routes(self, component: str, micro_batch: int) -> RowRoutes:
        """Return the routes of all items of a component in a micro-batch, including items that stay on their rank.

        Of ranks that make a call together, the n-th one sends to the n-th one of each call group.
        """
        item, consumer = self._consumers(component, micro_batch)
        order = np.lexsort((item, consumer))
        item, consumer = item[order], consumer[order]
        groups = self.topology.call_group_of(component)
        nth = (groups == np.arange(len(groups))[:, None]).argmax(axis=1)
        producer = groups[self.producer[item], nth[consumer]]
        return RowRoutes(item, producer, consumer, self.item_tokens[item])

    def loads(self, component: str) -> np.ndarray:
        """Return ``[M, ranks]`` int64: the cost of each rank's items; ranks of one call divide it, rounded up."""
        items = self.topology.items_of(component, self.slot)
        cell = self._micro_batch(items) * self.topology.world_size + self.producer[items]
        sums = np.bincount(cell, self.cost[items], self.num_micro_batches * self.topology.world_size)
        loads = sums.astype(np.int64).reshape(self.num_micro_batches, -1)
        planned, groups = self.topology.component(component), self.topology.call_group_of(component)
        loads = -(-loads[:, groups[:, 0]] // (groups.shape[1] if planned.is_shared else 1))
        return loads[:, list(planned.ranks)]

    def balance(self, component: str) -> Balance | None:
        """Return how the cost of an encoder is divided in this step; None: it has no items."""
        items, placement = self.topology.items_of(component, self.slot), self.topology.component(component)
        if not len(items):
            return None
        at_drawer = self.owner
        if placement.edge == "message":  # no rank that draws items has it: as if items stayed where they came
            ranks = np.array(placement.ranks)
            at_drawer = ranks[np.searchsorted(self.topology.readers, self.owner) % len(ranks)]
        mean = self.cost[items].sum() / len(placement.ranks)
        as_drawn = replace(self, producer=at_drawer)
        drawn, planned = (float(plan.loads(component).max(axis=1).sum() / mean) for plan in (as_drawn, self))
        return Balance(len(items), int((self.producer != self.owner)[items].sum()), drawn, planned)

    def features_moved(self, component: str) -> int:
        """Return the number of features that a step sends from a rank to another one, before their gradients return."""
        if not self.topology.moves(component):
            return 0
        routes = [self.routes(component, k) for k in range(self.num_micro_batches)]
        return sum(int(r.rows[r.producer != r.consumer].sum()) for r in routes)

    def __str__(self) -> str:
        """Return the counts, the tokens, and the work of each component in each micro-batch in which it runs."""
        counts = ", ".join(f"{name} {count:,}" for name, count in self.loss_counts.items())
        tokens = self.tokens.sum(axis=0)
        lines = [
            f"step plan: {self.topology.world_size} ranks, {self.num_micro_batches} micro-batches",
            f"predicted tokens: {counts or 'none'}",
            f"tokens drawn: {int(tokens.sum()):,}, per rank {int(tokens.min()):,} to {int(tokens.max()):,}",
        ]
        for micro_batch in range(self.num_micro_batches):
            active = [c for c in self.topology.components if self.is_active(c.name, micro_batch)]
            lines += [f"micro-batch {micro_batch}, {c.name}: {self._work_of(c, micro_batch)}" for c in active]
        return "\n".join(lines)

    def _work_of(self, component: Placement, micro_batch: int) -> str:
        """The work of a component in a micro-batch, in words."""
        call_sites = list(self.topology.call_sites_of(component.name))
        calls = self.calls[micro_batch, call_sites]
        calls_with_data = self.calls_with_data[micro_batch][call_sites][:, list(component.ranks)]
        routes, loads = self.routes(component.name, micro_batch), self.loads(component.name)[micro_batch]
        travelling = routes.item[(routes.producer != routes.consumer) & self.topology.moves(component.name)]
        return (
            f"{calls.sum()} calls, {len(np.unique(routes.item))} items, {len(np.unique(travelling))} of them travel; "
            f"minimal inputs on {(calls_with_data < calls[:, None]).any(axis=0).sum()} ranks; "
            f"largest cost of a rank / mean: {loads.max() / loads.mean() if loads.any() else 1:.2f}"
            f"{'; gradients are reduced' * (micro_batch == self.last_active(component.name))}"
        )

    def _micro_batch(self, items: np.ndarray) -> np.ndarray:
        """The micro-batch of items, or the first one of their window."""
        return self.slot[items] // max(1, len(self.topology.media))

    def _consumers(self, component: str, micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the items of a component, each once per consumer, and their consumers."""
        own, reader = self.topology.items_of(component, self.slot), self.topology.reader_of(component)
        is_now = self._micro_batch(own) == micro_batch
        if reader is None:
            item, consumer = self._copies(own[is_now])
            return item, consumer + self.topology.component(component).behind
        # All items are in the same order under both names.
        read = self.topology.items_of(reader, self.slot)
        makers = self.topology.call_group_of(reader)[self.producer[read[is_now]]]
        return np.repeat(own[is_now], makers.shape[1]), makers.ravel()

    def _copies(self, item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Repeat each item once per consumer. Return the items and their consumers."""
        groups = self.topology.data_groups
        sizes = np.array([len(group) for group in groups])
        group = self.topology.group_of[self.owner[item]]
        copies = sizes[group]
        consumer = np.concatenate(groups)[ranges((np.cumsum(sizes) - sizes)[group], copies)]
        return np.repeat(item, copies), consumer

    def _items_by_call(self, producer: int, micro_batch: int, call_site: int, num_calls: int) -> list[tuple[int, ...]]:
        if self.topology.call_sites[call_site].kind != "encode" or not num_calls:
            return [()] * num_calls
        cell = (micro_batch * len(self.topology.media) + call_site) * self.topology.world_size + producer
        in_cell = slice(*np.searchsorted(self.work_cell, [cell, cell + 1]))
        offsets = np.searchsorted(self.call[in_cell], np.arange(1, num_calls))
        return [tuple(items.tolist()) for items in np.split(self.work[in_cell], offsets)]


def plan_step(topology: Topology, tables: StepTables, rates: Rates | None = None) -> StepPlan:
    """Plan a step: a pure function of the topology and what all ranks drew, so the plan is the same on every rank."""
    tables = replace(tables, slot=_slots_of_windows(topology, tables))
    producer = _producers(topology, tables)
    work, call, work_cell, encodes = _work(topology, tables, producer)
    calls_with_data = np.concatenate([encodes, _other_calls(topology, tables)], axis=1)
    calls = calls_with_data.max(axis=2)
    return StepPlan(
        **vars(tables),
        topology=topology,
        calls=calls,
        calls_with_data=calls_with_data,
        producer=producer,
        work=work,
        call=call,
        work_cell=work_cell,
        rates=rates,
    )


def _slots_of_windows(topology: Topology, tables: StepTables) -> np.ndarray:
    """Return ``[items]``: the slots, with the first micro-batch of each window in place of its micro-batches."""
    micro_batch, medium = np.divmod(tables.slot, max(1, len(topology.media)))
    windows = np.ones(len(topology.media), dtype=np.int64)
    for component in topology.components:
        windows[topology.media_of(component.name)] = component.window or max(1, len(tables.counts))
    return (micro_batch - micro_batch % windows[medium]) * len(topology.media) + medium


def _producers(topology: Topology, tables: StepTables) -> np.ndarray:
    producer = tables.owner.copy()
    for component in topology.components:
        items = topology.items_of(component.name, tables.slot)
        if len(items):
            first, unit = _units(tables, items)
            micro_batch, owner = tables.slot[items[first]] // len(topology.media), tables.owner[items[first]]
            cost = np.bincount(unit, tables.cost[items]).astype(np.int64)
            producer[items] = _producers_of(topology, component, micro_batch, owner, cost)[unit]
    return producer


def _units(tables: StepTables, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each unit that one rank encodes its first of ``items``, in their order, and for each item its unit."""
    each = np.arange(len(items))
    if not tables.together[items].any():
        return each, each
    shape = np.where(tables.together[items], tables.shape[items], -1 - each)
    keys = np.stack([tables.slot[items], tables.owner[items], shape])
    first, unit = np.unique(keys, axis=1, return_index=True, return_inverse=True)[1:]
    order = np.argsort(first)
    return first[order], np.argsort(order)[unit.ravel()]


def _producers_of(
    topology: Topology, component: Placement, micro_batch: np.ndarray, owner: np.ndarray, cost: np.ndarray
) -> np.ndarray:
    """Return ``[items]``: the first rank of the call group that encodes each item of a component.

    With ``place: world``, items leave their data group only where that lowers the largest cost of a rank.
    """
    first = topology.call_group_of(component.name)[:, 0]
    if component.place == "local":
        return first[owner]
    workers = np.unique(first[list(component.ranks)])
    workers = workers[np.argsort(topology.group_of[workers], kind="stable")]
    in_group = np.bincount(topology.group_of[workers], minlength=len(topology.data_groups))
    if component.place == "group":
        return _dealt(workers, in_group, topology.group_of[owner], micro_batch, cost)
    dealt = _dealt(np.sort(workers), np.array([len(workers)]), np.zeros_like(owner), micro_batch, cost)
    if not in_group.all():
        return dealt
    stays = _dealt(workers, in_group, topology.group_of[owner], micro_batch, cost)
    largest = [_largest_cost(topology.world_size, producer, micro_batch, cost) for producer in (stays, dealt)]
    return np.where((largest[0] <= largest[1])[micro_batch], stays, dealt)


def _dealt(
    workers: np.ndarray, sizes: np.ndarray, group: np.ndarray, micro_batch: np.ndarray, cost: np.ndarray
) -> np.ndarray:
    """Deal the items of each micro-batch and group by cost to the group's workers, ``sizes[group]`` of ``workers``."""
    index = np.zeros(len(group), dtype=np.int64)
    if sizes.max() > 1:
        num_workers = np.tile(sizes, int(micro_batch.max()) + 1)
        index = assign_by_cost(micro_batch * len(sizes) + group, cost, num_workers)
    return workers[(np.cumsum(sizes) - sizes)[group] + index]


def _largest_cost(num_ranks: int, producer: np.ndarray, micro_batch: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return ``[micro-batches]``: the cost of the rank that encodes most."""
    sums = np.bincount(micro_batch * num_ranks + producer, cost, (int(micro_batch.max()) + 1) * num_ranks)
    return sums.reshape(-1, num_ranks).max(axis=1)


def _work(
    topology: Topology, tables: StepTables, producer: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return ``work``, ``call`` and ``work_cell`` of :class:`StepPlan`, and ``calls_with_data`` of the encoders."""
    ranks, media = topology.world_size, len(topology.media)
    cell = tables.slot * ranks + producer
    work = np.lexsort((tables.shape, cell))
    cell, shape = cell[work], tables.shape[work]
    opens_cell = np.diff(cell, prepend=-1) != 0
    opens_call = opens_cell | (np.diff(shape, prepend=-1) != 0) | _over_limits(topology, tables, work, cell, shape)
    calls_so_far = np.cumsum(opens_call)
    call = calls_so_far - calls_so_far[np.maximum.accumulate(np.where(opens_cell, np.arange(len(cell)), 0))]
    encodes = np.bincount(cell[opens_call], minlength=len(tables.counts) * media * ranks)
    encodes = encodes.reshape(len(tables.counts), media, ranks)
    for component in topology.components:
        of_component = topology.media_of(component.name)
        encodes[:, of_component] = encodes[:, of_component][:, :, topology.call_group_of(component.name)[:, 0]]
    return work, call, cell, encodes


def _over_limits(
    topology: Topology, tables: StepTables, work: np.ndarray, cell: np.ndarray, shape: np.ndarray
) -> np.ndarray:
    """Return ``[items]``, in the order of ``work``: whether an item opens a call because the one before it is full."""
    opens = np.zeros(len(work), dtype=bool)
    for component in topology.components:
        found = topology.items_of(component.name, tables.slot[work])
        if component.call_elements is None or not len(found):
            continue
        borders = np.flatnonzero((np.diff(cell[found]) != 0) | (np.diff(shape[found]) != 0)) + 1
        for together in np.split(found, borders):
            runs = runs_within(tables.elements[work[together]].tolist(), component.call_elements)
            opens[together[np.cumsum([0, *runs[:-1]])]] = True
    return opens


def _other_calls(topology: Topology, tables: StepTables) -> np.ndarray:
    """Return ``calls_with_data`` of forwards and heads: 1 if the data group has samples or tokens to predict."""
    group, call_sites = topology.group_of, topology.call_sites[len(topology.media) :]
    calls = np.zeros((len(tables.counts), len(call_sites), topology.world_size), dtype=np.int64)
    for index, call_site in enumerate(call_sites):
        is_head = call_site.kind == "head"
        drawn = tables.counts[:, topology.losses.index(call_site.name)] if is_head else tables.num_samples
        of_groups = np.zeros((len(topology.data_groups), len(drawn)), dtype=np.int64)
        np.add.at(of_groups, group, drawn.T)
        calls[:, index] = of_groups[group].T > 0
    return calls
