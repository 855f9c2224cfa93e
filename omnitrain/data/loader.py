"""Samples in global order -> packs, decoded ahead in background processes, resumable to the sample."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from omnitrain.data.ahead import run_ahead
from omnitrain.data.order import SampleOrder
from omnitrain.data.pack import Pack
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.data.sample import Rejected, Sample
from omnitrain.errors import DataError, TrainingError, UserError
from omnitrain.recipe import Data

Draw = tuple[int, int, int]

_PACKS_AHEAD = 4
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ROWS_PER_MESSAGE = 32  # rows that a worker prepares per message to the main process


class OmniDataCollatorWithPacking:
    """Collate function for a user's own ``DataLoader``: a list of samples becomes one :class:`Pack`."""

    def __call__(self, samples: Sequence[Sample]) -> Pack:
        """Lay ``samples`` end to end."""
        return Pack.from_samples(samples)


class _PreparedRows(Dataset[Any]):
    """Prepares rows in the workers.

    A mistake of the user's comes back as a value: raised there, it would arrive as a worker's traceback.
    """

    def __init__(
        self, sources: Sequence[RowSource], processor: OmniProcessor, max_tokens: int | None, cached: int = 0
    ) -> None:
        self.sources, self.processor, self.max_tokens = sources, processor, max_tokens
        self._prepared = functools.lru_cache(maxsize=cached)(self._prepare)

    def __getitem__(self, draw: Draw) -> Sample | Rejected | UserError:
        index, source, row = draw
        try:
            return dataclasses.replace(self._prepared(source, row), index=index)
        except UserError as error:
            return error

    def _prepare(self, source: int, row: int) -> Sample | Rejected:
        return self.processor.sample(self.sources[source][row], max_tokens=self.max_tokens)


@dataclass(frozen=True)
class LoaderState:
    """Where a loader stands: all that is needed to continue it."""

    next_index: int = 0
    held: tuple[int, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class PackLoader:
    """Endless packs of training data.

    Iterate it once; :meth:`state` after any pack continues exactly behind that pack.

    Attributes:
        sources: the open data sets.
    """

    def __init__(
        self, sources: Sequence[RowSource], processor: OmniProcessor, data: Data, seed: int, state: LoaderState
    ) -> None:
        """See :func:`build_dataloader`."""
        self.data, self.sources = data, sources
        self.order = SampleOrder([len(s) for s in sources], [s.weight for s in data.train], seed)
        self.rows = _PreparedRows(sources, processor, data.pack_tokens, cached=data.cached_samples)
        self._state = state

    def state(self) -> LoaderState:
        """How the pack handed out last left the data: what a checkpoint keeps."""
        return self._state

    @property
    def rejected(self) -> dict[str, Rejected]:
        """Rows skipped so far, by id."""
        return {row.id: row for row in self._state.rejected}

    def __iter__(self) -> Generator[Pack, None, None]:
        packs = _Packer(self, self._state).packs()
        # Closed by name: workers that the garbage collector has to end hang for five seconds.
        with contextlib.closing(run_ahead(packs, _PACKS_AHEAD) if self.data.workers else packs) as stream:
            for pack, self._state in stream:
                yield pack


class _Packer:
    """One pass of a loader: samples drawn and held back, and packs made of them."""

    def __init__(self, loader: PackLoader, start: LoaderState) -> None:
        self.data, self.order, self.rows = loader.data, loader.order, loader.rows
        self.start, self.next_index = start, start.next_index
        self.held: list[Sample] = []
        self.held_tokens = 0
        self.failures = 0  # rows rejected since the last good one
        self.rejected = {row.id: row for row in start.rejected}

    def packs(self) -> Generator[tuple[Pack, LoaderState], None, None]:
        """Packs, each with the state behind it."""
        with contextlib.closing(self._samples()) as samples:
            for _ in self.start.held:
                self._draw(samples)
            while True:
                while len(self.held) < self.data.packing_buffer or self.held_tokens < self.data.pack_tokens:
                    self._draw(samples)
                chosen = fill_pack(self.held, self.data.pack_tokens)
                self.held_tokens -= _tokens(chosen)
                indices = {sample.index for sample in chosen}
                self.held = [sample for sample in self.held if sample.index not in indices]
                held = tuple(sample.index for sample in self.held)
                yield Pack.from_samples(chosen), LoaderState(self.next_index, held, tuple(self.rejected.values()))

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
        self.rejected[drawn.id] = drawn
        self.failures += 1
        if self.failures >= sum(self.order.lengths):
            raise DataError(f"every row was rejected; the last, {drawn.id!r}: {drawn.reason}")

    def _samples(self) -> Generator[Sample | Rejected | UserError, None, None]:
        loader: DataLoader[Any] = DataLoader(
            self.rows,
            batch_size=_ROWS_PER_MESSAGE,
            sampler=_Draws(self.order, self.start),
            num_workers=self.data.workers,
            collate_fn=list,
            worker_init_fn=_quiet_worker,
            prefetch_factor=8 if self.data.workers else None,
            generator=torch.Generator(),  # else it draws a seed from the generator that dropout and resuming depend on
        )
        try:
            for batch in loader:
                yield from batch
        except RuntimeError as error:
            raise TrainingError(f"a data worker ended: {error}") from error


class _Draws(torch.utils.data.Sampler[Draw]):
    """The order from a state on: held samples first, then everything from ``next_index``."""

    def __init__(self, order: SampleOrder, state: LoaderState) -> None:
        self.order, self.state = order, state

    def __iter__(self) -> Iterator[Draw]:
        held = set(self.state.held)
        waiting: dict[int, Draw] = {}
        draws = iter(self.order)
        for draw in itertools.islice(draws, self.state.next_index):
            if draw[0] in held:
                waiting[draw[0]] = draw
        yield from (waiting[index] for index in self.state.held)
        yield from draws


def _quiet_worker(_: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole group: the main process answers them. Its death is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)


def first_samples(sources: Sequence[RowSource], processor: OmniProcessor) -> dict[str, Sample | Rejected | UserError]:
    """The first row of every source of metrics, prepared: tells within moments whether a model can use the data."""
    rows = _PreparedRows(sources, processor, max_tokens=None)
    firsts = {name: (0, s, group[0]) for s, table in enumerate(sources) for name, group in table.by_source().items()}
    return {name: rows[draw] for name, draw in firsts.items()}


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample) for sample in samples)


def fill_pack(held: Sequence[Sample], capacity: int) -> list[Sample]:
    """The oldest sample, then the longest ones that still fit: dense packs in which nobody waits for ever.

    Args:
        held: samples in order of arrival, none longer than ``capacity``; not empty.
        capacity: length of a pack, tokens.
    """
    chosen, free = [held[0]], capacity - len(held[0])
    for sample in sorted(held[1:], key=lambda sample: (-len(sample), sample.index)):
        if len(sample) <= free:
            chosen.append(sample)
            free -= len(sample)
    return chosen


def pack_all(samples: Iterable[Sample], capacity: int) -> Iterator[Pack]:
    """Packs of a finite stream, for evaluation; every sample is used once.

    Raises:
        ValueError: a sample longer than ``capacity``.
    """
    held: list[Sample] = []
    for sample in samples:
        if len(sample) > capacity:
            raise ValueError(f"sample {sample.id!r} has {len(sample)} tokens, a pack holds {capacity}")
        if _tokens(held) + len(sample) > capacity:
            yield Pack.from_samples(held)
            held = []
        held.append(sample)
    if held:
        yield Pack.from_samples(held)


def build_dataloader(
    data: Data, processor: OmniProcessor, *, seed: int = 0, state: LoaderState | None = None
) -> PackLoader:
    """The training packs of a recipe.

    Args:
        data: the recipe's ``data`` node.
        processor: turns rows into samples.
        seed: of the data order.
        state: continue from here (:meth:`PackLoader.state`).

    Raises:
        DataError: a data set that is missing, empty, or lacks a column.
    """
    return PackLoader(open_sources(data.train), processor, data, seed, state or LoaderState())
