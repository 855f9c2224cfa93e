"""Which rows a rank sends and receives in an exchange. Pure: no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnitrain.plan import RowRoutes


@dataclass(frozen=True)
class RowSplits:
    """What one rank sends and receives, row by row in the order on the wire: peer by peer, in the table's order.

    Attributes:
        made: ``[sent rows]`` int64, where they are among the rows of the items that the rank makes.
        sent: number of them for each rank of the group.
        needed: ``[received rows]`` int64, where they belong among the rows of the items that the rank needs.
        received: number of them from each rank of the group.
    """

    made: np.ndarray
    sent: list[int]
    needed: np.ndarray
    received: list[int]

    @property
    def parts(self) -> list[int]:
        """Numbers of rows that cut ``made`` into runs without repetition: by consumer, which gets an item once."""
        if len(np.unique(self.made)) == len(self.made):
            return [len(self.made)]
        return [rows for rows in self.sent if rows]


@dataclass(frozen=True)
class RankRouting:
    """Both ways of a rank's exchange.

    Attributes:
        there: from producers to consumers.
        back: the entries along which gradients go back; of replicas only one.
        num_rows_made: of all items that the rank makes.
        is_local: no item leaves its rank, on no rank.
    """

    there: RowSplits
    back: RowSplits
    num_rows_made: int
    is_local: bool


def rank_routing(
    routes: RowRoutes,
    ranks: Sequence[int],
    rank: int,
    made: Sequence[int] | None = None,
    replicas: Sequence[Sequence[int]] | np.ndarray = (),
) -> RankRouting:
    """What ``rank`` sends and receives.

    Args:
        routes: by global ranks, one entry per item and consumer; a consumer gets its items in the order of its entries.
        ranks: of the group, in order; entries between others are left out.
        rank: global rank, one of them.
        made: items that ``rank`` makes, in the order of their rows; None: ascending.
        replicas: groups of global ranks whose gradients for an item are equal.

    Raises:
        ValueError: a table that contradicts itself or leaves the group, or other items than ``made``.
    """
    place = list(ranks).index(rank)
    table, num_rows_made = _Table.of_group(routes, ranks, replicas).with_rows_made(place, made)
    there = table.splits(place, len(ranks))
    back = table.one_per_replica().splits(place, len(ranks))
    return RankRouting(there, back, num_rows_made, bool((table.producer == table.consumer).all()))


@dataclass(frozen=True)
class _Table:
    """A routing table in ranks of one group.

    Attributes:
        replica: ``[n]`` label of the consumer; replicas of each other have the same.
        at_consumer: ``[n]`` first row among those that the consumer needs.
        at_producer: ``[n]`` first row among those that one rank makes; 0 in entries of other producers.
    """

    item: np.ndarray
    producer: np.ndarray
    consumer: np.ndarray
    rows: np.ndarray
    replica: np.ndarray
    at_consumer: np.ndarray
    at_producer: np.ndarray

    @classmethod
    def of_group(
        cls, routes: RowRoutes, ranks: Sequence[int], replicas: Sequence[Sequence[int]] | np.ndarray
    ) -> _Table:
        known = [0, *ranks, *(rank for group in replicas for rank in group)]
        highest = max([*known, *routes.producer.tolist(), *routes.consumer.tolist()])
        place = np.full(highest + 1, -1)
        place[list(ranks)] = np.arange(len(ranks))
        label = np.arange(highest + 1)
        for index, group in enumerate(replicas):
            label[np.asarray(group)] = highest + 1 + index
        producer, consumer = place[routes.producer], place[routes.consumer]
        crossing = (producer < 0) != (consumer < 0)
        if crossing.any():
            items = np.unique(routes.item[crossing]).tolist()
            raise ValueError(f"items {items} go between ranks of the group {list(ranks)} and others")
        inside = producer >= 0
        columns = (routes.item, producer, consumer, routes.rows, label[routes.consumer])
        item, producer, consumer, rows, replica = (column[inside] for column in columns)
        table = cls(item, producer, consumer, rows, replica, _starts(consumer, rows), np.zeros_like(rows))
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
        found = [f"items {np.unique(items).tolist()} {problem}" for problem, items in problems.items() if len(items)]
        if found:
            raise ValueError("\n".join(found))

    def with_rows_made(self, place: int, made: Sequence[int] | None) -> tuple[_Table, int]:
        """With ``at_producer`` for the rank at ``place``, and the number of rows that it makes."""
        own = self.producer == place
        items, first_entry = np.unique(self.item[own], return_index=True)
        if made is not None and sorted(made) != items.tolist():
            raise ValueError(f"this rank makes the items {items.tolist()} of the routing table; found {list(made)}")
        order = np.searchsorted(items, items if made is None else np.asarray(made, dtype=items.dtype))
        rows = self.rows[own][first_entry]
        start = np.empty_like(rows)
        start[order] = np.cumsum(rows[order]) - rows[order]
        at_producer = np.zeros_like(self.rows)
        at_producer[own] = start[np.searchsorted(items, self.item[own])]
        return replace(self, at_producer=at_producer), int(rows.sum())

    def one_per_replica(self) -> _Table:
        """Of an item's entries whose consumers are replicas, the one that stays on its rank, or the first."""
        order = np.lexsort((self.consumer, self.consumer != self.producer, self.replica, self.item))
        item, replica = self.item[order], self.replica[order]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = (item[1:] != item[:-1]) | (replica[1:] != replica[:-1])
        return self._only(np.sort(order[is_first]))

    def splits(self, place: int, num_ranks: int) -> RowSplits:
        """What the rank at ``place`` sends and receives."""
        out, into = self.producer == place, self.consumer == place
        sent, received = self._only(_sorted(out, self.consumer)), self._only(_sorted(into, self.producer))
        return RowSplits(
            made=_ranges(sent.at_producer, sent.rows),
            sent=_sums(sent.consumer, sent.rows, num_ranks),
            needed=_ranges(received.at_consumer, received.rows),
            received=_sums(received.producer, received.rows, num_ranks),
        )

    def _only(self, entries: np.ndarray) -> _Table:
        return replace(self, **{name: column[entries] for name, column in vars(self).items()})


def _sorted(chosen: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Indices of the chosen entries, by key, else in their order."""
    entries = np.flatnonzero(chosen)
    return entries[np.argsort(key[entries], kind="stable")]


def _starts(group: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``[n]``: rows of the earlier entries of the same group."""
    order = np.argsort(group, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    first_of_group = np.searchsorted(group[order], group[order])
    starts = np.empty_like(before)
    starts[order] = before - before[first_of_group]
    return starts


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``start, start + 1, ...`` of each, end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())


def _sums(group: np.ndarray, rows: np.ndarray, num_groups: int) -> list[int]:
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, rows)
    return [int(total) for total in sums]
