"""Rows of media on their way to the ranks that have their tokens. Pure: no process group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnitrain.data.pack import Pack
from omnitrain.plan import PlannedComponent
from omnitrain.plan.sequence import SequenceSplit
from omnitrain.plan.step import RowRoutes


def positions_of(pack: Pack, component: PlannedComponent) -> np.ndarray:
    """``[rows]`` int64: the token of each row of the media that a component reads, item by item as plans count them."""
    names = [port.name for port in component.ports if port.name in pack.inputs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(pack.inputs[name].positions.numpy() for name in names)])


def rows_for_parts(
    routes: RowRoutes, rank: int, positions: np.ndarray, split: SequenceSplit, made: Sequence[int]
) -> tuple[RowRoutes, list[int]]:
    """Routes of runs of rows in place of whole items: each to the one rank that has their tokens.

    Args:
        routes: of all items of a component in a micro-batch.
        rank: this one; the ranks that share its row are neighbours.
        positions: ``[rows]`` int64, the tokens of the rows of the items in its row, in the order of the items' routes.
        split: of its row.
        made: items that it makes, in this order.

    Returns:
        Routes among the ranks that share the row, whose items are runs; and the runs that ``rank`` makes, in order.
    """
    own = routes.consumer == rank
    item, producer, rows = routes.item[own], routes.producer[own], routes.rows[own]
    place = np.empty(split.num_tokens, dtype=np.int64)
    for number, tokens in enumerate(split.rows):
        place[tokens] = number
    place_of_row, item_of_row = place[positions], np.repeat(np.arange(len(item)), rows)
    opens = (np.diff(place_of_row, prepend=-1) != 0) | (np.diff(item_of_row, prepend=-1) != 0)
    starts = np.flatnonzero(opens)
    of = item_of_row[starts]
    first_rank = rank - rank % len(split.rows)
    consumer = first_rank + place_of_row[starts]
    order = np.argsort(consumer, kind="stable")
    runs = RowRoutes(order, producer[of][order], consumer[order], np.diff(starts, append=len(positions))[order])
    return runs, [int(run) for number in made for run in np.flatnonzero(item[of] == number)]
