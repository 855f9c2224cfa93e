"""``StepPlan``: who does what in one optimizer step, computed alike on every rank before anything moves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from omnitrain.plan.balance import assign_by_cost
from omnitrain.plan.show import ComponentLine, component_table
from omnitrain.plan.sorting import stable_order
from omnitrain.plan.tables import StepTables
from omnitrain.plan.topology import PlannedComponent, Topology


@dataclass(frozen=True)
class Call:
    """One call of a component on one rank.

    Attributes:
        call_site: index in ``topology.call_sites``.
        index: among the calls of this entrance in this micro-batch.
        items: to encode, in this order; empty for a forward or head.
        is_minimal: this rank has nothing for the call, and makes it with the component's minimal input.
    """

    call_site: int
    index: int
    items: tuple[int, ...]
    is_minimal: bool


@dataclass(frozen=True)
class RowRoutes:
    """Items on their way from producers to consumers, consumer by consumer, in the order in which each needs them.

    Attributes:
        item: ``[routes]`` int64.
        producer: ``[routes]`` int64, rank that encodes it.
        consumer: ``[routes]`` int64, rank whose sequence has its rows.
        rows: ``[routes]`` int64.
    """

    item: np.ndarray
    producer: np.ndarray
    consumer: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Everything the ranks decide together for one optimizer step. ``M``: its micro-batches, ``E``: entrances.

    An item's number is its place in the table of all ranks: by owner, then micro-batch, port, and order in the pack.

    Attributes:
        topology: what it was planned for.
        num_micro_batches: of every rank; ranks that drew fewer run empty ones.
        is_last: no rank has data after this step.
        loss_counts: loss name -> predicted tokens of the whole step, the one divisor of that loss.
        num_samples: ``[M, ranks]`` int64, drawn by each rank.
        tokens: ``[M, ranks]`` int64, drawn by each rank.
        calls: ``[M, E]`` int64, calls of each entrance; the same on all ranks of its component.
        own_calls: ``[M, E, ranks]`` int64, those for which a rank has data; in its others the input is minimal.
        owner: ``[items]`` int64, rank that drew the item.
        producer: ``[items]`` int64, rank that encodes it; of a component that is shared, with those of its data group.
        slot: ``[items]`` int64, ``micro-batch * ports + port``.
        rows: ``[items]`` int64.
        cost: ``[items]`` int64.
        work: ``[items]`` int64, all items by slot, producer and call.
        call: ``[items]`` int64, in the order of ``work``: the call, among those of its slot on its producer.
        work_cell: ``[items]`` int64, ascending, in the order of ``work``: ``slot * ranks + producer``.
    """

    topology: Topology
    num_micro_batches: int
    is_last: bool
    loss_counts: dict[str, int]
    num_samples: np.ndarray
    tokens: np.ndarray
    calls: np.ndarray
    own_calls: np.ndarray
    owner: np.ndarray
    producer: np.ndarray
    slot: np.ndarray
    rows: np.ndarray
    cost: np.ndarray
    work: np.ndarray
    call: np.ndarray
    work_cell: np.ndarray

    def is_active(self, component: str, micro_batch: int) -> bool:
        """Whether the component runs in this micro-batch: then all of its ranks call it."""
        return bool(self.calls[micro_batch, list(self.topology.call_sites_of(component))].any())

    def last_active(self, component: str) -> int | None:
        """The last micro-batch in which the component runs: it reduces across replicas. None: it never runs."""
        active = np.flatnonzero(self.calls[:, list(self.topology.call_sites_of(component))].any(axis=1))
        return int(active[-1]) if len(active) else None

    def calls_of(self, rank: int, component: str, micro_batch: int) -> tuple[Call, ...]:
        """What a rank of the component calls in a micro-batch, in order."""
        if rank not in self.topology.component(component).ranks:
            return ()
        calls = []
        for call_site in self.topology.call_sites_of(component):
            own = int(self.own_calls[micro_batch, call_site, rank])
            items = self._items_by_call(self._producer_for(rank, component), micro_batch, call_site, own)
            calls += [Call(call_site, index, made, is_minimal=False) for index, made in enumerate(items)]
            calls += [
                Call(call_site, index, (), is_minimal=True) for index in range(own, self.calls[micro_batch, call_site])
            ]
        return tuple(calls)

    def minimal_ranks(self, micro_batch: int, call_site: int, index: int) -> tuple[int, ...]:
        """Ranks that make this call with the component's minimal input."""
        own = self.own_calls[micro_batch, call_site]
        component = self.topology.component(self.topology.call_sites[call_site].component)
        return tuple(rank for rank in component.ranks if own[rank] <= index < self.calls[micro_batch, call_site])

    def routes(self, component: str, micro_batch: int) -> RowRoutes:
        """Ways of all items of a component in a micro-batch; also of those that stay on their rank."""
        item, consumer = self._copies(self._items(component, micro_batch))
        order = stable_order(consumer, item)
        item, consumer = item[order], consumer[order]
        return RowRoutes(item, self.producer[item], consumer, self.rows[item])

    def has_exchange(self, component: str, micro_batch: int, rank: int) -> bool:
        """Whether ``rank`` takes part in an exchange: with ``place: world`` all ranks, else those of its data group."""
        if not self.topology.ports_of(component) or not self.topology.moves(component):
            return False
        routes = self.routes(component, micro_batch)
        travels = routes.producer != routes.consumer
        if self.topology.component(component).place != "world":
            travels &= self.topology.group_of[routes.consumer] == self.topology.group_of[rank]
        return bool(travels.any())

    def loads(self, component: str) -> np.ndarray:
        """``[M, ranks of the component]`` int64: cost of what each of them encodes; of what several share, its part."""
        micro_batch, port = np.divmod(self.slot, max(1, len(self.topology.ports)))
        ports = self.topology.ports_of(component)
        own = (port >= ports.start) & (port < ports.stop)
        cell = micro_batch[own] * self.topology.world_size + self.producer[own]
        sums = _sums(cell, self.cost[own], self.num_micro_batches * self.topology.world_size)
        loads = sums.reshape(self.num_micro_batches, -1)
        if self.topology.component(component).is_shared:
            for group in self.topology.data_groups:
                loads[:, group] = -(-loads[:, group].sum(axis=1, keepdims=True) // len(group))
        return loads[:, list(self.topology.component(component).ranks)]

    def digest(self) -> str:
        """Equal for equal plans: what ranks compare to be sure that they agree."""
        content = hashlib.blake2b(digest_size=8)
        for field in fields(self):
            value = getattr(self, field.name)
            content.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return content.hexdigest()

    def component_lines(self) -> tuple[ComponentLine, ...]:
        """A line for each component in each micro-batch in which it runs, micro-batch by micro-batch."""
        return tuple(
            self._component_line(component, micro_batch)
            for micro_batch in range(self.num_micro_batches)
            for component in self.topology.components
            if self.is_active(component.name, micro_batch)
        )

    def _component_line(self, component: PlannedComponent, micro_batch: int) -> ComponentLine:
        call_sites = list(self.topology.call_sites_of(component.name))
        calls = self.calls[micro_batch, call_sites]
        own = self.own_calls[micro_batch][call_sites][:, list(component.ranks)]
        routes = self.routes(component.name, micro_batch)
        travels = (routes.producer != routes.consumer) & self.topology.moves(component.name)
        loads = self.loads(component.name)[micro_batch]
        return ComponentLine(
            micro_batch=micro_batch,
            component=component.name,
            calls=int(calls.sum()),
            items=len(np.unique(routes.item)),
            travelling=len(np.unique(routes.item[travels])),
            minimal_ranks=int((own < calls[:, None]).any(axis=0).sum()),
            imbalance=float(loads.max() / loads.mean()) if loads.any() else 1.0,
            reduces=micro_batch == self.last_active(component.name),
        )

    def __str__(self) -> str:
        """Counts, tokens and a table of :meth:`component_lines`."""
        counts = ", ".join(f"{name} {count:,}" for name, count in self.loss_counts.items())
        tokens = self.tokens.sum(axis=0)
        head = [
            f"step plan {self.digest()}: {self.topology.world_size} ranks, {self.num_micro_batches} micro-batches"
            + (", the last of the data" if self.is_last else ""),
            f"predicted tokens: {counts or 'none'}",
            f"tokens drawn: {int(tokens.sum()):,}, per rank {int(tokens.min()):,} to {int(tokens.max()):,}",
        ]
        return "\n".join([*head, *component_table(self.component_lines())])

    def _producer_for(self, rank: int, component: str) -> int:
        """Whose items ``rank`` encodes."""
        if not self.topology.component(component).is_shared:
            return rank
        return self.topology.data_groups[self.topology.group_of[rank]][0]

    def _items(self, component: str, micro_batch: int) -> np.ndarray:
        """Items of a component in a micro-batch."""
        first, ports = micro_batch * len(self.topology.ports), self.topology.ports_of(component)
        return np.flatnonzero((self.slot >= first + ports.start) & (self.slot < first + ports.stop))

    def _copies(self, item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each item as often as it has consumers, and those."""
        groups = self.topology.data_groups
        sizes = np.array([len(group) for group in groups])
        group = self.topology.group_of[self.owner[item]]
        copies = sizes[group]
        nth = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
        consumer = np.concatenate(groups)[np.repeat((np.cumsum(sizes) - sizes)[group], copies) + nth]
        return np.repeat(item, copies), consumer

    def _made(self, rank: int, micro_batch: int, port: int) -> np.ndarray:
        """Items of a port that ``rank`` encodes in a micro-batch, call by call."""
        return self.work[self._cell(rank, micro_batch, port)]

    def _cell(self, rank: int, micro_batch: int, port: int) -> slice:
        cell = (micro_batch * len(self.topology.ports) + port) * self.topology.world_size + rank
        return slice(*np.searchsorted(self.work_cell, [cell, cell + 1]))

    def _items_by_call(self, rank: int, micro_batch: int, call_site: int, own: int) -> list[tuple[int, ...]]:
        if self.topology.call_sites[call_site].kind != "encode" or not own:
            return [()] * own
        calls = self.call[self._cell(rank, micro_batch, call_site)]
        borders = np.searchsorted(calls, np.arange(1, own))
        return [tuple(part.tolist()) for part in np.split(self._made(rank, micro_batch, call_site), borders)]


def plan_step(topology: Topology, tables: StepTables) -> StepPlan:
    """Plan a step: a pure function of what all ranks drew.

    Args:
        topology: of the run.
        tables: of all ranks (:func:`omnitrain.plan.tables.decode_tables`).

    Returns:
        The same plan on every rank.
    """
    num_micro_batches = len(tables.counts)
    producer = _producers(topology, tables)
    work, call, work_cell, encodes = _work(topology, tables, producer)
    own_calls = np.concatenate([encodes, _other_calls(topology, tables)], axis=1)
    counts = tables.counts.sum(axis=(0, 2)).tolist()
    return StepPlan(
        topology=topology,
        num_micro_batches=num_micro_batches,
        is_last=bool(tables.has_ended.all()),
        loss_counts=dict(zip(topology.losses, counts, strict=True)),
        num_samples=tables.num_samples,
        tokens=tables.tokens,
        calls=own_calls.max(axis=2),
        own_calls=own_calls,
        owner=tables.owner,
        producer=producer,
        slot=tables.slot,
        rows=tables.rows,
        cost=tables.cost,
        work=work,
        call=call,
        work_cell=work_cell,
    )


def _producers(topology: Topology, tables: StepTables) -> np.ndarray:
    producer = tables.owner.copy()
    micro_batch, port = np.divmod(np.arange(len(tables.counts) * len(topology.ports)), max(1, len(topology.ports)))
    for component in topology.components:
        ports = topology.ports_of(component.name)
        if component.place == "local" or component.is_shared or not ports:
            continue
        chosen = np.flatnonzero(((port >= ports.start) & (port < ports.stop))[tables.slot])
        workers, group = _workers(topology, component)
        problem = (micro_batch * len(workers))[tables.slot[chosen]] + group[tables.owner[chosen]]
        num_workers = np.tile([len(ranks) for ranks in workers], len(tables.counts))
        index = assign_by_cost(problem, tables.cost[chosen], num_workers)
        first = np.cumsum([0, *(len(ranks) for ranks in workers)])[:-1]
        producer[chosen] = np.concatenate(workers)[np.tile(first, len(tables.counts))[problem] + index]
    return producer


def _workers(topology: Topology, component: PlannedComponent) -> tuple[list[np.ndarray], np.ndarray]:
    """The sets of ranks that share work among themselves, and ``[ranks]`` the set that encodes a rank's items."""
    if component.place == "world":
        return [np.array(component.ranks)], np.zeros(topology.world_size, dtype=np.int64)
    shared = [np.array([rank for rank in group if rank in component.ranks]) for group in topology.data_groups]
    return shared, topology.group_of


def _work(
    topology: Topology, tables: StepTables, producer: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``work``, ``call`` and ``work_cell`` of :class:`StepPlan`, and its ``own_calls`` of the ports."""
    ranks, ports = topology.world_size, len(topology.ports)
    cell = tables.slot * ranks + producer
    work = stable_order(cell, tables.shape)
    cell, shape = cell[work], tables.shape[work]
    apart = np.tile([port.is_one_at_a_time for port in topology.ports], len(tables.counts)).astype(bool)
    opens_cell = np.diff(cell, prepend=-1) != 0
    opens_call = opens_cell | (np.diff(shape, prepend=-1) != 0) | apart[tables.slot[work]]
    number = np.cumsum(opens_call)  # of the call among all
    call = number - number[np.maximum.accumulate(np.where(opens_cell, np.arange(len(cell)), 0))]
    encodes = np.bincount(cell[opens_call], minlength=len(tables.counts) * ports * ranks)
    encodes = encodes.reshape(len(tables.counts), ports, ranks)
    owners = [group[0] for group in topology.data_groups]
    for component in topology.components:
        if component.is_shared:
            own = topology.ports_of(component.name)
            encodes[:, own] = encodes[:, own][:, :, owners][:, :, topology.group_of]
    return work, call, cell, encodes


def _other_calls(topology: Topology, tables: StepTables) -> np.ndarray:
    """``own_calls`` of forwards and heads: one where the rank's data group has samples, or tokens to predict."""
    group = topology.group_of
    members = (group[:, None] == group).astype(np.int64)
    calls = []
    for call_site in topology.call_sites[len(topology.ports) :]:
        is_head = call_site.kind == "head"
        drawn = tables.counts[:, topology.losses.index(call_site.name)] if is_head else tables.num_samples
        calls.append((drawn @ members) > 0)
    shape = (len(tables.counts), len(calls), topology.world_size)
    return np.stack(calls, axis=1).astype(np.int64) if calls else np.zeros(shape, dtype=np.int64)


def _sums(index: np.ndarray, value: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(index, value, size).astype(np.int64)
