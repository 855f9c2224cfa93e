"""Compute the rows that each rank sends and receives in an exchange; needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnitrain.data.packing.pack import Pack
from omnitrain.plan import Placement, RowRoutes
from omnitrain.plan.ragged import ranges
from omnitrain.plan.sequence import SequenceSplit


@dataclass(frozen=True)
class RowSplits:
    """The rows that one rank sends and receives, ordered by peer, then as in the routing table."""

    made: np.ndarray  # ``[sent rows]`` int64: index of each sent row among the rows that the rank makes
    sent: list[int]  # number of rows sent to each rank of the group
    needed: np.ndarray  # ``[received rows]`` int64: index of each received row among the rows that the rank needs
    received: list[int]  # number of rows received from each rank of the group

    @property
    def parts(self) -> list[int]:
        """Lengths that split ``made`` into runs without repeated rows: by consumer, which gets an item once."""
        if len(np.unique(self.made)) == len(self.made):
            return [len(self.made)]
        return [rows for rows in self.sent if rows]


@dataclass(frozen=True)
class RankRouting:
    """The exchange of a rank."""

    splits: RowSplits  # the rows that go from producers to consumers, and whose gradients go back
    num_rows_made: int  # number of rows of all items that the rank makes
    is_local: bool  # whether no item leaves its rank, on any rank


def rank_routing(routes: RowRoutes, ranks: Sequence[int], rank: int, made: Sequence[int] | None = None) -> RankRouting:
    """Return the rows that ``rank`` sends and receives.

    Args:
        routes: routes by global rank, one entry per item and consumer. A consumer gets its items in the order of its
            entries.
        ranks: global ranks of the group, in order; entries between other ranks are ignored.
        rank: one of these global ranks.
        made: items that ``rank`` makes, in the order of their rows; None: ascending.

    Raises:
        ValueError: the routes contradict themselves or leave the group, or ``made`` has other items.
    """
    group_rank = list(ranks).index(rank)
    table, num_rows_made = _Table.of_group(routes, ranks).with_rows_made(group_rank, made)
    splits = table.splits(group_rank, len(ranks))
    return RankRouting(splits, num_rows_made, bool((table.producer == table.consumer).all()))


@dataclass(frozen=True)
class _Table:
    """A routing table with ranks of one group."""

    item: np.ndarray  # ``[n]`` item of the entry
    producer: np.ndarray  # ``[n]`` group rank that makes it
    consumer: np.ndarray  # ``[n]`` group rank that needs it
    rows: np.ndarray  # ``[n]`` its number of rows
    at_consumer: np.ndarray  # ``[n]`` first row among the rows that the consumer needs
    at_producer: np.ndarray  # ``[n]`` first row among the rows that one rank makes; 0 for entries of other producers

    @classmethod
    def of_group(cls, routes: RowRoutes, ranks: Sequence[int]) -> _Table:
        highest = max([*ranks, *routes.producer.tolist(), *routes.consumer.tolist()])
        group_rank = np.full(highest + 1, -1)
        group_rank[list(ranks)] = np.arange(len(ranks))
        producer, consumer = group_rank[routes.producer], group_rank[routes.consumer]
        crossing = (producer < 0) != (consumer < 0)
        if crossing.any():
            items = np.unique(routes.item[crossing]).tolist()
            raise ValueError(f"items {items} go between ranks of the group {list(ranks)} and others")
        inside = producer >= 0
        columns = (routes.item, producer, consumer, routes.rows)
        item, producer, consumer, rows = (column[inside] for column in columns)
        table = cls(item, producer, consumer, rows, _starts(consumer, rows), np.zeros_like(rows))
        table.check()
        return table

    def check(self) -> None:
        order = np.lexsort((self.consumer, self.item))
        item, producer, consumer, rows = (c[order] for c in (self.item, self.producer, self.consumer, self.rows))
        same = item[1:] == item[:-1]
        problems = {
            "have several producers": item[1:][same & (producer[1:] != producer[:-1])],
            "have several numbers of rows": item[1:][same & (rows[1:] != rows[:-1])],
            "go twice to the same consumer": item[1:][same & (consumer[1:] == consumer[:-1])],
            "have fewer than 0 rows": item[rows < 0],
        }
        lines = [f"items {np.unique(items).tolist()} {problem}" for problem, items in problems.items() if len(items)]
        if lines:
            raise ValueError("\n".join(lines))

    def with_rows_made(self, group_rank: int, made: Sequence[int] | None) -> tuple[_Table, int]:
        """A copy with ``at_producer`` for this rank, and the number of rows that it makes."""
        is_made = self.producer == group_rank
        items, first_entry = np.unique(self.item[is_made], return_index=True)
        if made is not None and sorted(made) != items.tolist():
            raise ValueError(f"this rank makes the items {items.tolist()} of the routing table; found {list(made)}")
        order = np.searchsorted(items, items if made is None else np.asarray(made, dtype=items.dtype))
        rows = self.rows[is_made][first_entry]
        start = np.empty_like(rows)
        start[order] = np.cumsum(rows[order]) - rows[order]
        at_producer = np.zeros_like(self.rows)
        at_producer[is_made] = start[np.searchsorted(items, self.item[is_made])]
        return replace(self, at_producer=at_producer), int(rows.sum())

    def splits(self, group_rank: int, num_ranks: int) -> RowSplits:
        """The rows that this rank sends and receives."""
        sent = self._only(_sorted(self.producer == group_rank, self.consumer))
        received = self._only(_sorted(self.consumer == group_rank, self.producer))
        return RowSplits(
            made=ranges(sent.at_producer, sent.rows),
            sent=_sums(sent.consumer, sent.rows, num_ranks),
            needed=ranges(received.at_consumer, received.rows),
            received=_sums(received.producer, received.rows, num_ranks),
        )

    def _only(self, entries: np.ndarray) -> _Table:
        return replace(self, **{name: column[entries] for name, column in vars(self).items()})


def positions_of(pack: Pack, component: Placement) -> np.ndarray:
    """Return ``[rows]`` int64: the token position of each feature row of a component, in the plan's order of items."""
    names = [name for name in component.media if name in pack.inputs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(pack.inputs[name].positions.numpy() for name in names)])


def routes_to_slices(
    routes: RowRoutes, group: Sequence[int], positions: np.ndarray, split: SequenceSplit, made: Sequence[int]
) -> tuple[RowRoutes, list[int]]:
    """Route each row to the ranks that have its token, instead of whole items to all ranks of a data group.

    Args:
        routes: routes of all items of a component in a micro-batch.
        group: the ranks of a data group, in order; equally many successive ones hold each slice.
        positions: ``[rows]`` int64: token positions of the items' rows, in the order of the items' routes.
        split: the split of the sequence.
        made: items that this rank encodes, in this order.

    Returns:
        Routes among the ranks of the group, whose items are runs of rows; and the runs of ``made``, in order.
    """
    of_consumers = [routes.consumer == rank for rank in group]
    item, rows = routes.item[of_consumers[0]], routes.rows[of_consumers[0]]
    slice_of_token = np.empty(split.num_tokens, dtype=np.int64)
    for index, tokens in enumerate(split.positions):
        slice_of_token[tokens] = index
    slice_of_row, item_of_row = slice_of_token[positions], np.repeat(np.arange(len(item)), rows)
    starts_run = (np.diff(slice_of_row, prepend=-1) != 0) | (np.diff(item_of_row, prepend=-1) != 0)
    starts = np.flatnonzero(starts_run)
    item_of_run, lengths = item_of_row[starts], np.diff(starts, append=len(positions))
    of_slices = [np.flatnonzero(slice_of_row[starts] == index) for index in range(len(split.positions))]
    needed = [of_slices[nth * len(of_slices) // len(group)] for nth in range(len(group))]  # by consumer
    run = np.concatenate(needed)
    producer = np.concatenate(
        [routes.producer[own][item_of_run[runs]] for own, runs in zip(of_consumers, needed, strict=True)]
    )
    runs = RowRoutes(run, producer, np.repeat(np.asarray(group), [len(own) for own in needed]), lengths[run])
    return runs, [int(run) for index in made for run in np.flatnonzero(item[item_of_run] == index)]


def _sorted(chosen: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Indices of the chosen entries, stably sorted by key."""
    entries = np.flatnonzero(chosen)
    return entries[np.argsort(key[entries], kind="stable")]


def _starts(group: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``[n]``: number of rows of the earlier entries in the same group."""
    order = np.argsort(group, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    first_of_group = np.searchsorted(group[order], group[order])
    starts = np.empty_like(before)
    starts[order] = before - before[first_of_group]
    return starts


def _sums(group: np.ndarray, rows: np.ndarray, num_groups: int) -> list[int]:
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, rows)
    return [int(total) for total in sums]
