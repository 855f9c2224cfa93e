"""Batches of any map-style or iterable dataset, for training loops of your own; resumable to the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from omnitrain.data.loading.data_process import follow_main_process
from omnitrain.data.loading.order import SourceShare
from omnitrain.data.loading.slots import share_of_rank
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.part_files import take_files
from omnitrain.data.sources.rows import MODALITIES, Row
from omnitrain.data.sources.turns import as_messages
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Columns

_MAX_FAILURES = 1000  # consecutive rejected rows


class MapDataset(Protocol):
    """A map-style dataset, such as ``torch.utils.data.Dataset``, ``datasets.Dataset`` or a list."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return a row."""
        ...


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _MicroBatch:
    """What ``collate_fn`` made of the rows of a micro-batch (None: all were rejected), or why it ends the run."""

    batch: Any
    num_rows: int
    rejected: tuple[Rejected, ...] = ()
    error: UserError | None = None


@dataclass(frozen=True)
class _MakeBatch:
    """Prepares the rows of a micro-batch and collates them, in any process."""

    processor: OmniProcessor | None
    collate: Collate
    max_tokens: int | None
    without_tails: bool

    def __call__(self, rows: Sequence[tuple[int, Any]]) -> _MicroBatch:
        try:
            prepared = [self._prepared(index, row) for index, row in rows]
        except UserError as error:
            return _MicroBatch(None, len(rows), error=error)
        kept = [
            (index, piece)
            for (index, _), one in zip(rows, prepared, strict=True)
            if not isinstance(one, Rejected)
            for piece in (one.pieces if isinstance(one, Sample) else [one])  # a long document has several
        ]
        rejected = tuple(one for one in prepared if isinstance(one, Rejected))
        if not kept:
            return _MicroBatch(None, len(rows), rejected)
        indices, values = zip(*kept, strict=True)
        packs = isinstance(self.collate, OmniDataCollatorWithPacking)
        return _MicroBatch(self.collate(list(values), *([indices] if packs else [])), len(rows), rejected)

    def _prepared(self, index: int, row: Any) -> Any:
        if self.processor is not None:
            row = row if isinstance(row, Row) else _row_of(row, index)
            return self.processor.sample(row, index, self.max_tokens, without_tail=self.without_tails)
        return replace(row, index=index) if isinstance(row, Sample) else row


class _Numbered(Dataset[tuple[int, Any]]):
    """The rows of a map-style dataset with their positions in the order of all epochs."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, draw: tuple[int, int]) -> tuple[int, Any]:
        index, row = draw
        return index, self.dataset[row]


class _Stream(IterableDataset[Any]):
    """The micro-batches of a rank in each step, from an iterable dataset that every rank reads as a whole."""

    def __init__(self, dataset: Iterable[Any], make: _MakeBatch, first: int, size: int, parts: Sequence[slice]) -> None:
        """Drop ``first`` rows. Of every ``size`` rows that follow, make a micro-batch of each of ``parts``."""
        self.dataset, self.make, self.first, self.size = dataset, make, first, size
        self.part_of = {position: number for number, part in enumerate(parts) for position in range(size)[part]}

    def __iter__(self) -> Iterator[list[_MicroBatch]]:
        rows = islice(enumerate(self.dataset), self.first, None)
        for row in rows:
            parts: dict[int, list[tuple[int, Any]]] = {}  # only the rows of this rank stay in memory
            for position, one in enumerate(chain([row], islice(rows, self.size - 1))):
                if position in self.part_of:
                    parts.setdefault(self.part_of[position], []).append(one)
            yield [self.make(parts[number]) for number in sorted(parts)]


class DatasetLoader:
    """Steps of one rank: each is a list of micro-batches, the results of ``collate_fn``.

    Iterating it once is one epoch from where it is; the next iteration goes on. A step has the same rows on any number
    of ranks. The last step of an epoch may have fewer rows, so that a rank has fewer micro-batches, or none.

    Attributes:
        epoch: the current epoch, from 0.
        steps: steps of this epoch that were yielded.
        rejected: id -> row that this rank has skipped so far.
    """

    def __init__(
        self,
        dataset: MapDataset | Iterable[Any],
        processor: OmniProcessor | None = None,
        *,
        micro_batch_size: int,
        global_batch_size: int | None = None,
        collate_fn: Collate | None = None,
        shuffle: bool | None = None,
        num_workers: int = 0,
        seed: int = 0,
        max_tokens: int | None = None,
        without_tails: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """See :func:`~omnitrain.data.loading.loader.build_dataloader`."""
        rank, ranks = _rank_and_ranks(rank, ranks)
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = micro_batch_size * ranks if global_batch_size is None else global_batch_size
        _require_sizes(self.micro_batch_size, self.global_batch_size, ranks)
        self._dataset = cast(Any, dataset)
        self._is_map = _is_map(dataset)
        if not self._is_map and (shuffle or num_workers > 1):
            raise UserError(
                f"{'shuffle' if shuffle else 'num_workers'}: an iterable dataset is read in its own order, by at most "
                "one worker; shuffle it yourself, or pass a map-style dataset"
            )
        if self._is_map and not len(self._dataset):
            raise DataError("dataset: it has no rows")
        self._order = SourceShare("dataset", len(self._dataset) if self._is_map else 0)
        self._most_failures = min(_MAX_FAILURES, len(self._dataset)) if self._is_map else _MAX_FAILURES
        slots = share_of_rank(rank, ranks, self.global_batch_size // micro_batch_size).slots
        self._parts = [slice(slot * micro_batch_size, (slot + 1) * micro_batch_size) for slot in slots]
        self._num_workers, self._seed = num_workers, seed
        self._shuffles = self._is_map if shuffle is None else shuffle
        self._make = _MakeBatch(processor, collate_fn or OmniDataCollatorWithPacking(), max_tokens, without_tails)
        self.epoch = self.steps = 0
        self.rejected: dict[str, Rejected] = {}
        self._failures = 0

    def __len__(self) -> int:
        """Return the steps of an epoch.

        Raises:
            TypeError: the dataset is iterable, so its length is unknown.
        """
        return math.ceil(len(self._dataset) / self.global_batch_size)

    def state_dict(self) -> dict[str, int]:
        """Return the state after the last step, the same on all ranks and valid for any number of them."""
        rows = self.steps * self.global_batch_size
        return {"epoch": self.epoch, "steps": self.steps, "rows": rows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the step of :meth:`state_dict`. Of an iterable dataset, ``rows`` rows are read and dropped.

        Raises:
            UserError: ``global_batch_size`` was another one, so the steps had other rows.
        """
        if state["rows"] != state["steps"] * self.global_batch_size:
            raise UserError(
                f"global_batch_size: found {self.global_batch_size}, but the state has {state['steps']} steps of "
                f"{state['rows']} rows; pass the one that the run began with"
            )
        self.epoch, self.steps = state["epoch"], state["steps"]

    def __iter__(self) -> Iterator[list[Any]]:
        for micro_batches in self._of_map() if self._is_map else self._of_stream():
            self.steps += 1
            yield [one.batch for one in map(self._checked, micro_batches) if one.batch is not None]
        self.epoch, self.steps = self.epoch + 1, 0

    def _of_map(self) -> Iterator[list[_MicroBatch]]:
        steps = range(self.steps, len(self))
        loader = DataLoader(
            _Numbered(self._dataset),
            batch_sampler=(self._draws(part) for step in steps for part in self._parts_of(step)),
            collate_fn=self._make,
            num_workers=self._num_workers,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # else DataLoader would advance the global generator, which dropout uses
        )
        micro_batches = iter(loader)
        for step in steps:
            yield [next(micro_batches) for _ in self._parts_of(step)]

    def _parts_of(self, step: int) -> list[range]:
        """Return the positions in the epoch's order of each of this rank's micro-batches."""
        start = step * self.global_batch_size
        positions = range(start, min(start + self.global_batch_size, len(self._dataset)))
        return [positions[part] for part in self._parts if positions[part]]

    def _draws(self, positions: range) -> list[tuple[int, int]]:
        """Return the index in the order of all epochs, and the row, of each position."""
        indices = np.array(positions) + self.epoch * len(self._dataset)
        rows = self._order.rows(indices, self._seed) if self._shuffles else np.array(positions)
        return list(zip(indices.tolist(), rows.tolist(), strict=True))

    def _of_stream(self) -> Iterator[list[_MicroBatch]]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self.epoch)
        size = self.global_batch_size
        stream = _Stream(self._dataset, self._make, self.steps * size, size, self._parts)
        yield from DataLoader(
            stream,
            batch_size=None,
            num_workers=self._num_workers,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),
        )

    def _checked(self, made: _MicroBatch) -> _MicroBatch:
        """Count rejected rows, and raise the error of a row that the model cannot use."""
        if made.error is not None:
            raise made.error
        self.rejected.update({row.id: row for row in made.rejected})
        self._failures = 0 if made.batch is not None else self._failures + len(made.rejected)
        if self._failures >= self._most_failures:
            last = made.rejected[-1]
            raise DataError(f"all of {self._failures} rows were rejected; the last, {last.id!r}: {last.reason}")
        return made


def _rank_and_ranks(rank: int | None, ranks: int | None) -> tuple[int, int]:
    if ranks is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise UserError(
            f"ranks: this run has {dist.get_world_size()} ranks; pass rank=state.dp_rank, ranks=state.dp_size of "
            "ot.get_parallel_state(), so that each rank has its rows"
        )
    rank, ranks = (0, 1) if rank is None and ranks is None else (rank, ranks)
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise UserError(f"rank, ranks: found {rank} and {ranks}; expected a rank from 0 to below the number of ranks")
    return rank, ranks


def _require_sizes(micro_batch_size: int, global_batch_size: int, ranks: int) -> None:
    if micro_batch_size < 1 or global_batch_size % micro_batch_size:
        raise UserError(
            f"global_batch_size: found {global_batch_size}; expected a multiple of micro_batch_size {micro_batch_size}"
        )
    if (number := global_batch_size // micro_batch_size) < ranks:
        raise UserError(
            f"global_batch_size: {global_batch_size} samples are {number} micro-batches of {micro_batch_size}, but "
            f"{ranks} ranks need at least one each; raise it to {ranks * micro_batch_size}"
        )


def _is_map(dataset: Any) -> bool:
    """Whether a dataset is map-style; torch's ``IterableDataset`` inherits a ``__getitem__`` that raises."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return True
    if not hasattr(dataset, "__iter__"):
        raise UserError(
            f"dataset: found a {type(dataset).__name__}; expected the `data` of a recipe, a map-style dataset (__len__ "
            "and __getitem__), or an iterable one (__iter__)"
        )
    return False


def _row_of(record: Any, index: int) -> Row:
    """Return the data row of a dict, with the columns' default names."""
    if not isinstance(record, Mapping):
        raise UserError(
            f"dataset: row {index} is a {type(record).__name__}; with a processor, rows must be ot.Row objects, or "
            "dicts with `messages` and perhaps `images`, `audios`, `videos`, `tools`"
        )
    columns, name = Columns(), f"dataset[{index}]"
    if columns.messages not in record:
        raise UserError(f"dataset: row {index} has no {columns.messages!r}; found {sorted(map(str, record))}")
    files = {modality: record.get(getattr(columns, f"{modality}s")) for modality in MODALITIES}
    media = {m: list(f) if isinstance(f, (list, tuple)) else [f] * (f is not None) for m, f in files.items()}
    used = {columns.id, columns.source, columns.messages, columns.tools, *columns.of_media().values()}
    row = Row(
        id=str(record.get(columns.id, name)),
        source=str(record.get(columns.source, "dataset")),
        messages=[],
        media=media,
        extra={key: value for key, value in record.items() if key not in used},
        tools=record.get(columns.tools),
    )
    try:
        messages, media = take_files(as_messages(record[columns.messages], marked=frozenset()), media)
    except ValueError as error:
        return replace(row, problem=str(error))
    return replace(row, messages=messages, media=media)


def _start_worker(_: int) -> None:
    follow_main_process()
