"""A data set as a table of records by their positions, whatever its files are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from omnitrain.data.sources.schema import Schema

EXAMPLES = 64  # rows that are looked at when a data set is opened
URL_READS = 16  # most reads for them, if the data set is at a URL

Choose = Callable[[Sequence[str]], Schema]  # how rows with given columns are read


class Table(ABC):
    """The records of a data set, by position. It can be pickled.

    ``column_names``: of all records; a record may lack some. ``schema``: how its records are read. ``kinds``: kind of
    messages -> position of the first record that has it: ``(role, None)``, ``(role, type of a part)``, for further keys
    ``(role, "message.KEY")``, ``(role, "part.KEY")``, ``(role, "part.KEY.KEY")``, as in the file, and ``("tools",
    None)`` and ``("system", None)`` of columns; None: see :meth:`examples`. ``blocks``: records of each part that is
    read at once; empty: they are read one by one.
    """

    column_names: Sequence[str]
    schema: Schema
    kinds: Mapping[tuple[Any, Any], int] | None = None
    blocks: tuple[int, ...] = ()
    _ends: Sequence[int]  # after the last record of each of its parts

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _place(self, position: int) -> tuple[int, int]:
        """Return the part that has a record, and the record's position in it."""
        part = bisect_right(self._ends, position)
        return part, position - (self._ends[part - 1] if part else 0)

    @abstractmethod
    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return a record; ReadError: not this one; DataError: no later one either."""

    @abstractmethod
    def examples(self, length: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and outline of some of the first ``length`` records, without those that cannot be read."""

    def outline(self, position: int) -> dict[str, Any]:
        """Return a record; in the place of a medium's bytes may be whether there are any."""
        return self[position]

    def sources(self) -> list[Any] | None:
        """Return each record's value in the source column; None: it is known when a record is read."""
        return None

    def problems(self) -> list[str]:
        """Return why its columns cannot be read, one text per problem."""
        return []


def evenly_spaced(total: int, most: int) -> list[int]:
    """Return at most ``most`` positions below ``total``, from the first to the last."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64)).tolist()
