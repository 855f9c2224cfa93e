"""Turn the rows of the data order into samples, in one stream per slot, with processes that serve all slots."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from omnitrain.data.loading.data_process import follow_main_process
from omnitrain.data.loading.order import Draw
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.lengths import sample_within
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import RowSource
from omnitrain.errors import DataError, TrainingError, UserError
from omnitrain.recipe.data import Overlong

_DEAD_WORKER = "DataLoader worker (pid"  # start of torch's message that a worker died
_ROWS_PER_MESSAGE = 8  # rows that a helper prepares per message
_MESSAGES_AHEAD = 4  # most messages that a helper prepares ahead; few, because rows with video are large


class PreparedRows(Dataset[Any]):
    """Prepares data rows, in any process.

    It returns a UserError instead of raising it, because torch would turn it into a worker's traceback.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        budget: PackBudget | None = None,
        cached: int = 0,
        without_tails: bool = False,
        overlong: Sequence[Overlong] | None = None,
    ) -> None:
        """Prepare the rows of ``sources``.

        Args:
            sources: the data sets.
            processor: turns rows into samples.
            budget: the most that a pack may hold; None: no limit.
            cached: number of prepared samples that each process keeps.
            without_tails: see :meth:`Sample.without_tail`.
            overlong: what to do with samples that exceed the budget, for each data set. None: reject them.
        """
        self.sources, self.processor, self.budget, self.cached = sources, processor, budget, cached
        self.without_tails, self.overlong = without_tails, overlong or ["drop"] * len(sources)

    def __getitem__(self, draw: Draw) -> Sample | Rejected | UserError:
        index, source, row = draw
        try:
            prepared = self._prepared(source, row)
        except UserError as error:
            return error
        if isinstance(prepared, Sample) and prepared.more:
            more = tuple(dataclasses.replace(piece, index=index) for piece in prepared.more)
            prepared = dataclasses.replace(prepared, more=more)
        return dataclasses.replace(prepared, index=index)

    @functools.cached_property  # built at the first use, because a cache cannot be pickled to another process
    def _prepared(self) -> Any:
        return functools.lru_cache(maxsize=self.cached)(self._prepare)

    def _prepare(self, source: int, row: int) -> Sample | Rejected:
        overlong, data_row = self.overlong[source], self.sources[source][row]
        prepared = sample_within(self.processor, data_row, self.budget, overlong, without_tail=self.without_tails)
        if overlong == "error" and isinstance(prepared, Rejected) and prepared.is_overlong:
            raise DataError(
                f"row {prepared.id!r}: {prepared.reason}; raise the limit, or set `overlong` to `drop` or `split`"
            )
        return prepared


class SlotRows:
    """A stream of prepared rows per slot, in the order of its draws and independent of other slots.

    Without helpers a row is prepared when it is taken. With helpers, rows are requested ahead, always for the slot with
    the fewest rows ahead, so the number of waiting rows stays bounded.

    Use it in a ``with`` block, which ends the helpers.

    Raises:
        TrainingError: raised at the end of the block if a helper was killed, because torch raises that error anywhere
            in the main thread.
    """

    def __init__(self, rows: PreparedRows, draws: Mapping[int, Iterator[Draw]], helpers: int) -> None:
        """Prepare ``rows`` for ``draws``.

        Args:
            rows: prepares the rows.
            draws: slot -> its draws.
            helpers: number of processes that prepare rows.
        """
        self._rows, self._draws, self._helpers = rows, dict(draws), helpers
        self._ready: dict[int, deque[Sample | Rejected | UserError]] = {slot: deque() for slot in draws}
        self._ahead = dict.fromkeys(draws, 0)  # rows requested and not taken yet
        self._batch_size = _ROWS_PER_MESSAGE if helpers else 1
        self._ended: set[int] = set()  # slots whose draws have all been requested
        self._arrived: set[int] = set()  # slots whose last rows have arrived
        self._requested: deque[tuple[int, Iterator[Draw]]] = deque()  # slot and draws of each batch that is to come
        self._batches = self._prepare()

    def take(self, slot: int) -> Sample | Rejected | None:
        """Return the next row of a slot; None if its draws have ended.

        Raises:
            UserError: the model cannot use the row.
        """
        self._ahead[slot] -= 1  # must come first: without helpers the batch is requested in `next` below
        while not self._ready[slot]:
            if slot in self._arrived:
                return None
            batch = next(self._batches)
            owner, draws = self._requested.popleft()
            if draws is self._draws[owner]:  # else the slot was redirected since
                self._ready[owner].extend(batch)
                if len(batch) < self._batch_size:
                    self._arrived.add(owner)
        row = self._ready[slot].popleft()
        if isinstance(row, UserError):
            raise row
        return row

    def redirect(self, slot: int, draws: Iterator[Draw]) -> None:
        """Go on with other draws of a slot. Its rows that wait are dropped."""
        self._draws[slot] = draws
        self._ready[slot].clear()
        self._ahead[slot] = 0
        self._ended.discard(slot)
        self._arrived.discard(slot)

    def __enter__(self) -> SlotRows:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._batches.close()
        if isinstance(error, RuntimeError) and str(error).startswith(_DEAD_WORKER):
            raise TrainingError(f"a process that prepares rows ended (out of memory?): {error}") from error

    def _requests(self) -> Iterator[list[Draw]]:
        while True:
            slot = min(self._ahead, key=lambda one: (one in self._ended, self._ahead[one]))
            batch = list(islice(self._draws[slot], self._batch_size))
            if len(batch) < self._batch_size:
                self._ended.add(slot)
            self._ahead[slot] += self._batch_size
            self._requested.append((slot, self._draws[slot]))
            yield batch

    def _prepare(self) -> Generator[list[Any], None, None]:
        """Yield batches of prepared rows, in the order of the requests."""
        loader: DataLoader[Any] = DataLoader(
            self._rows,
            batch_sampler=self._requests(),
            num_workers=self._helpers,
            collate_fn=list,
            worker_init_fn=_start_helper,
            prefetch_factor=_MESSAGES_AHEAD if self._helpers else None,
            generator=torch.Generator(),  # else DataLoader would advance the global generator, which dropout uses
        )
        yield from loader


def _start_helper(_: int) -> None:
    follow_main_process()
