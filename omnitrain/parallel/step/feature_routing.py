"""Compute the rows that each rank sends and receives in an exchange; needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    num_rows_made: int  # number of rows of all items that the rank makes
    is_local: bool  # whether no item leaves its rank, on any rank

    @property
    def parts(self) -> list[int]:
        """Lengths that split ``made`` into runs without repeated rows: by consumer, which gets an item once."""
        if len(np.unique(self.made)) == len(self.made):
            return [len(self.made)]
        return [rows for rows in self.sent if rows]


def row_splits(routes: RowRoutes, ranks: Sequence[int], rank: int, made: Sequence[int] | None = None) -> RowSplits:
    """Return the rows that ``rank`` sends and receives.

    Args:
        routes: routes by global rank, one entry per item and consumer. A consumer gets its items in the order of its
            entries.
        ranks: global ranks of the group, in order; entries between other ranks are ignored.
        rank: one of these global ranks.
        made: items that ``rank`` makes, in the order of their rows; None: ascending.
    """
    group_rank = np.full(max([*ranks, *routes.producer.tolist(), *routes.consumer.tolist()]) + 1, -1)
    group_rank[list(ranks)] = np.arange(len(ranks))
    own, inside = group_rank[rank], group_rank[routes.consumer] >= 0
    columns = (routes.item, group_rank[routes.producer], group_rank[routes.consumer], routes.rows)
    item, producer, consumer, rows = (column[inside] for column in columns)
    sent, received = _sorted(producer == own, consumer), _sorted(consumer == own, producer)
    items, first = np.unique(item[sent], return_index=True)
    order = np.arange(len(items)) if made is None else np.searchsorted(items, np.asarray(made, dtype=items.dtype))
    lengths = rows[sent][first][order]
    starts = np.empty_like(lengths)  # of items, ascending
    starts[order] = np.cumsum(lengths) - lengths
    at_consumer = np.cumsum(rows * (consumer == own)) - rows
    return RowSplits(
        made=ranges(starts[np.searchsorted(items, item[sent])], rows[sent]),
        sent=_sums(consumer[sent], rows[sent], len(ranks)),
        needed=ranges(at_consumer[received], rows[received]),
        received=_sums(producer[received], rows[received], len(ranks)),
        num_rows_made=int(lengths.sum()),
        is_local=bool((producer == consumer).all()),
    )


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


def _sums(group: np.ndarray, rows: np.ndarray, num_groups: int) -> list[int]:
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, rows)
    return [int(total) for total in sums]
