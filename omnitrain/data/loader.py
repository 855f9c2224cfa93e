"""Samples in global order -> packs, made ahead in background processes, resumable to the sample."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from omnitrain.data.ahead import follow_main_process, run_ahead
from omnitrain.data.order import Draw, SampleOrder
from omnitrain.data.pack import Pack
from omnitrain.data.packing import fill_pack, num_tokens
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.data.sample import Rejected, Sample
from omnitrain.errors import DataError, TrainingError, UserError
from omnitrain.recipe import Data

_PACKS_AHEAD = 4
_DEAD_WORKER = "DataLoader worker (pid"  # how torch begins to say that one is gone
_ROWS_PER_MESSAGE = 8  # rows that a helper prepares per message
_MESSAGES_AHEAD = 4  # messages that a helper prepares at the most before they are drawn: rows with video are large
_MOST_FAILURES = 1000  # rows rejected in a row, in an order that is shuffled: nothing else is to be expected


class _PreparedRows(Dataset[Any]):
    """Prepares rows, in whatever process.

    A mistake of the user's comes back as a value: raised there, it would arrive as a worker's traceback.
    """

    def __init__(
        self, sources: Sequence[RowSource], processor: OmniProcessor, max_tokens: int | None, cached: int = 0
    ) -> None:
        self.sources, self.processor, self.max_tokens, self.cached = sources, processor, max_tokens, cached

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
        return self.processor.sample(self.sources[source][row], max_tokens=self.max_tokens)


@dataclass(frozen=True)
class LoaderState:
    """Where a loader stands: all that is needed to continue it.

    Attributes:
        next_index: global index of the first sample not drawn yet.
        held: indices of samples that were drawn and are in no pack yet, oldest first.
        rejected: rows skipped so far.
    """

    next_index: int = 0
    held: tuple[int, ...] = ()
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class _Packed:
    """A pack, and what making it changed: the first index not drawn, samples held back, rows newly rejected."""

    pack: Pack
    next_index: int
    held: tuple[int, ...]
    rejected: tuple[Rejected, ...]


class PackLoader:
    """Endless packs of training data.

    Iterate it once; :meth:`state` after any pack continues exactly behind that pack.

    Attributes:
        sources: the open data sets.
        rejected: rows skipped so far, by id.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        data: Data,
        seed: int,
        state: LoaderState,
        alone: bool = False,
    ) -> None:
        """See :func:`build_dataloader`."""
        self.data, self.sources, self.alone = data, sources, alone
        self.order = SampleOrder([len(s) for s in sources], [s.weight for s in data.train], seed)
        self.rows = _PreparedRows(sources, processor, data.pack_tokens, cached=data.cached_samples)
        self.rejected = {row.id: row for row in state.rejected}
        self._next_index, self._held = state.next_index, state.held

    def state(self) -> LoaderState:
        """How the pack handed out last left the data: what a checkpoint keeps."""
        return LoaderState(self._next_index, self._held, tuple(self.rejected.values()))

    def __iter__(self) -> Generator[Pack, None, None]:
        make_packs = _Packer(self.data, self.order, self.rows, self._next_index, self._held, self.alone).packs
        # Closed by name: processes that the garbage collector has to end hang for five seconds.
        with contextlib.closing(run_ahead(make_packs, _PACKS_AHEAD) if self.data.workers else make_packs()) as stream:
            for packed in stream:
                self._next_index, self._held = packed.next_index, packed.held
                self.rejected.update({row.id: row for row in packed.rejected})
                yield packed.pack


class _Packer:
    """One pass of a loader: samples drawn and held back, and packs made of them."""

    def __init__(
        self,
        data: Data,
        order: SampleOrder,
        rows: _PreparedRows,
        next_index: int,
        held: tuple[int, ...],
        alone: bool = False,
    ) -> None:
        self.data, self.rows, self.alone = data, rows, alone
        self.draws = _Draws(order, held, next_index)
        self.next_index = next_index
        self.held: list[Sample] = []
        self.held_tokens = 0
        self.most_failures = min(sum(order.lengths), _MOST_FAILURES)
        self.failures = 0  # rows rejected since the last good one
        self.rejected: list[Rejected] = []  # since the last pack

    def packs(self) -> Generator[_Packed, None, None]:
        """Packs without end.

        Raises:
            UserError: data of no use to the model.
            TrainingError: a process that prepares rows was killed.
        """
        try:
            yield from self._packs()
        except RuntimeError as error:
            if not str(error).startswith(_DEAD_WORKER):
                raise
            raise TrainingError(f"a process that prepares rows ended (out of memory?): {error}") from error

    def _packs(self) -> Generator[_Packed, None, None]:
        with contextlib.closing(self._samples()) as samples:
            for _ in self.draws.held:
                self._draw(samples)
            while True:
                while len(self.held) < self.data.packing_buffer or self.held_tokens < self.data.pack_tokens:
                    self._draw(samples)
                chosen = fill_pack(self.held, self.data.pack_tokens, alone=self.alone)
                self.held_tokens -= num_tokens(chosen)
                indices = {sample.index for sample in chosen}
                self.held = [sample for sample in self.held if sample.index not in indices]
                held, rejected = tuple(sample.index for sample in self.held), tuple(self.rejected)
                self.rejected = []
                yield _Packed(Pack.from_samples(chosen), self.next_index, held, rejected)

    def _draw(self, samples: Iterator[Sample | Rejected | UserError]) -> None:
        drawn = next(samples)
        if isinstance(drawn, UserError):
            raise drawn
        self.next_index = max(self.next_index, drawn.index + 1)
        if isinstance(drawn, Sample):
            self.held.append(drawn)
            self.held_tokens += len(drawn)
            self.failures = 0
            return
        if self.data.overlong == "error" and drawn.is_overlong:
            raise DataError(f"row {drawn.id!r}: {drawn.reason}; raise data.pack_tokens or set data.overlong: drop")
        self.rejected.append(drawn)
        self.failures += 1
        if self.failures >= self.most_failures:
            raise DataError(f"all of {self.failures} rows were rejected; the last, {drawn.id!r}: {drawn.reason}")

    def _samples(self) -> Generator[Sample | Rejected | UserError, None, None]:
        """Prepared rows. Of ``data.workers`` processes one makes the packs, and the others prepare rows for it."""
        helpers = max(0, self.data.workers - 1)
        loader: DataLoader[Any] = DataLoader(
            self.rows,
            batch_size=_ROWS_PER_MESSAGE if helpers else 1,
            sampler=self.draws,
            num_workers=helpers,
            collate_fn=list,
            worker_init_fn=_start_helper,
            prefetch_factor=_MESSAGES_AHEAD if helpers else None,
            generator=torch.Generator(),  # else it draws a seed from the generator that dropout and resuming depend on
        )
        for batch in loader:
            yield from batch


class _Draws(Sampler[Draw]):
    """The order from a state on: held samples first, then everything from ``next_index``."""

    def __init__(self, order: SampleOrder, held: tuple[int, ...], next_index: int) -> None:
        self.order, self.held, self.next_index = order, held, next_index

    def __iter__(self) -> Iterator[Draw]:
        yield from (self.order[index] for index in self.held)
        yield from self.order.draws(self.next_index)


def _start_helper(_: int) -> None:
    follow_main_process()


def first_samples(sources: Sequence[RowSource], processor: OmniProcessor) -> dict[str, Sample | Rejected | UserError]:
    """The first row of every source of metrics, prepared: tells within moments whether a model can use the data."""
    rows = _PreparedRows(sources, processor, max_tokens=None)
    firsts = {name: (0, s, group[0]) for s, table in enumerate(sources) for name, group in table.by_source().items()}
    return {name: rows[draw] for name, draw in firsts.items()}


def require_usable(sources: Sequence[RowSource], processor: OmniProcessor) -> None:
    """Prepare the first row of each kind (:meth:`RowSource.first_of_each_kind`).

    What no component can read or write is found before training, however late in the data it comes.

    Raises:
        UserError: what the model cannot do with the data, a line each.
    """
    rows = _PreparedRows(sources, processor, max_tokens=None)
    tried = [rows[0, s, position] for s, table in enumerate(sources) for position in table.first_of_each_kind()]
    problems = dict.fromkeys(str(result) for result in tried if isinstance(result, UserError))
    if problems:
        raise UserError("\n".join(problems))


def build_dataloader(
    data: Data,
    processor: OmniProcessor,
    *,
    seed: int = 0,
    state: LoaderState | None = None,
    alone: bool = False,
) -> PackLoader:
    """The training packs of a recipe.

    Args:
        data: the recipe's ``data`` node.
        processor: turns rows into samples.
        seed: of the data order.
        state: continue from here (:meth:`PackLoader.state`).
        alone: one sample per pack, for a model that cannot keep several apart (``not model.runner.contract.packs``).

    Raises:
        DataError: a data set that is missing, empty, or lacks a column.
    """
    return PackLoader(open_sources(data.train), processor, data, seed, state or LoaderState(), alone)
