"""Prepare single data rows: read, decode and tokenize them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from omnitrain.data.loading.order import Draw
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.lengths import sample_within
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row, RowSource
from omnitrain.errors import DataError, UserError
from omnitrain.recipe.data import Overlong

Prepared = Sample | Rejected | UserError


class PreparedRows:
    """Prepares data rows, in any process. ``on_read`` is called with each row that has been read, before its media are.

    It returns a UserError instead of raising it, because it may have to travel to another process.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        budget: PackBudget | None = None,
        cached: int = 0,
        without_tails: bool = False,
        overlong: Sequence[Overlong] | None = None,
        may_ask: bool = False,
        dropped: Callable[[int], frozenset[str]] | None = None,
    ) -> None:
        """Prepare the rows of ``sources``; each process keeps ``cached`` samples.

        ``overlong`` is what to do with samples that exceed the budget, for each data set; None: reject them.
        ``dropped`` returns what the condition of the sample of an index loses; None: nothing. Further arguments as of
        :func:`~omnitrain.data.render.lengths.sample_within`.
        """
        self.sources, self.processor, self.budget, self.cached = sources, processor, budget, cached
        self.overlong = overlong or ["drop"] * len(sources)
        self._options = {"without_tail": without_tails, "may_ask": may_ask}
        self._dropped = dropped
        self.on_read: Callable[[Row], None] | None = None

    def seconds(self, source: int) -> float | None:
        """Return the deadline of each row of a source, in seconds; None: it has none."""
        return getattr(self.sources[source], "sample_seconds", None)  # a plain sequence of rows has none

    @property
    def may_hang(self) -> bool:
        """Whether any source has a deadline, and media that may miss it."""
        return any(
            self.seconds(number) is not None and getattr(source, "shown", True)
            for number, source in enumerate(self.sources)
        )

    def __getitem__(self, draw: Draw) -> Prepared:
        index, source, row = draw
        try:
            prepared = self._prepared(source, row, self._dropped(index) if self._dropped else frozenset())
        except UserError as error:
            return error
        if isinstance(prepared, Sample) and prepared.more:
            more = tuple(dataclasses.replace(piece, index=index) for piece in prepared.more)
            prepared = dataclasses.replace(prepared, more=more)
        return dataclasses.replace(prepared, index=index)

    @functools.cached_property  # built at the first use, because a cache cannot be pickled to another process
    def _prepared(self) -> Any:
        return functools.lru_cache(maxsize=self.cached)(self._prepare)

    def _prepare(self, source: int, row: int, dropped: frozenset[str]) -> Sample | Rejected:
        overlong, data_row = self.overlong[source], self.sources[source][row]
        if self.on_read is not None:
            self.on_read(data_row)
        prepared = sample_within(self.processor, data_row, self.budget, overlong, dropped=dropped, **self._options)
        if overlong == "error" and isinstance(prepared, Rejected) and prepared.is_overlong:
            raise DataError(
                f"row {prepared.id!r}: {prepared.reason}; raise the limit, or set `overlong` to `drop` or `split`"
            )
        return prepared
