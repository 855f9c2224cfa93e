"""Rows of the data order turned into samples, one stream per slot, by processes that serve all slots."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from omnitrain.data.ahead import follow_main_process
from omnitrain.data.order import Draw
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource
from omnitrain.data.sample import Rejected, Sample
from omnitrain.errors import TrainingError, UserError

_DEAD_WORKER = "DataLoader worker (pid"  # how torch begins to say that one is gone
_ROWS_PER_MESSAGE = 8  # rows that a helper prepares per message
_MESSAGES_AHEAD = 4  # messages that a helper prepares at the most before they are drawn: rows with video are large


class PreparedRows(Dataset[Any]):
    """Prepares rows, in whatever process.

    A mistake of the user's comes back as a value: raised there, it would arrive as a worker's traceback.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        max_tokens: int | None,
        cached: int = 0,
        without_tails: bool = False,
    ) -> None:
        self.sources, self.processor, self.max_tokens, self.cached = sources, processor, max_tokens, cached
        self.without_tails = without_tails

    def __getitem__(self, draw: Draw) -> Sample | Rejected | UserError:
        index, source, row = draw
        try:
            return dataclasses.replace(self._prepared(source, row), index=index)
        except UserError as error:
            return error

    @functools.cached_property  # made at the first use: a cache cannot travel to another process
    def _prepared(self) -> Any:
        return functools.lru_cache(maxsize=self.cached)(self._prepare)

    def _prepare(self, source: int, row: int) -> Sample | Rejected:
        read = self.sources[source][row]
        return self.processor.sample(read, max_tokens=self.max_tokens, without_tail=self.without_tails)


class SlotRows:
    """A stream of prepared rows per slot, each in the order of its draws, however much another slot takes.

    Without helpers a row is prepared when it is taken. With them, rows are asked for ahead, always for the slot that
    has least ahead: so what waits for slots that take little stays bounded.

    Use it in a ``with`` block, which ends the helpers.

    Raises:
        TrainingError: out of the block, where a helper was killed: torch tells of that wherever the main thread is.
    """

    def __init__(self, rows: PreparedRows, draws: Mapping[int, Iterator[Draw]], helpers: int) -> None:
        """``draws``: slot -> what it draws, endless; ``helpers``: processes that prepare rows."""
        self._rows, self._draws, self._helpers = rows, draws, helpers
        self._ready: dict[int, deque[Sample | Rejected | UserError]] = {slot: deque() for slot in draws}
        self._ahead = dict.fromkeys(draws, 0)  # rows asked for and not taken yet
        self._asked: deque[int] = deque()  # slots of the batches that are on their way
        self._batches = self._prepare()

    def take(self, slot: int) -> Sample | Rejected:
        """The next row of a slot.

        Raises:
            UserError: it asks for something that the model cannot do.
        """
        self._ahead[slot] -= 1  # first: without helpers the batch asked for now is the one that comes
        while not self._ready[slot]:
            batch = next(self._batches)
            self._ready[self._asked.popleft()].extend(batch)
        row = self._ready[slot].popleft()
        if isinstance(row, UserError):
            raise row
        return row

    def __enter__(self) -> SlotRows:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._batches.close()
        if isinstance(error, RuntimeError) and str(error).startswith(_DEAD_WORKER):
            raise TrainingError(f"a process that prepares rows ended (out of memory?): {error}") from error

    def _requests(self) -> Iterator[list[Draw]]:
        size = _ROWS_PER_MESSAGE if self._helpers else 1
        while True:
            slot = min(self._ahead, key=self._ahead.__getitem__)
            self._ahead[slot] += size
            self._asked.append(slot)
            yield list(islice(self._draws[slot], size))

    def _prepare(self) -> Generator[list[Any], None, None]:
        """Batches of prepared rows, in the order in which they were asked for."""
        loader: DataLoader[Any] = DataLoader(
            self._rows,
            batch_sampler=self._requests(),
            num_workers=self._helpers,
            collate_fn=list,
            worker_init_fn=_start_helper,
            prefetch_factor=_MESSAGES_AHEAD if self._helpers else None,
            generator=torch.Generator(),  # else it draws a seed from the generator that dropout and resuming depend on
        )
        yield from loader


def _start_helper(_: int) -> None:
    follow_main_process()
