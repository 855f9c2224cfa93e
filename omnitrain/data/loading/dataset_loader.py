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
from omnitrain.data.packing.budget import PackBudget, fill_pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row, row_of
from omnitrain.data.sources.schema import Schema
from omnitrain.errors import DataError, UserError
from omnitrain.ops.draws import mixed_seed
from omnitrain.recipe import Columns

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class MicroBatches:
    """What ``collate_fn`` made of some rows of a step, the rejected rows, or the error that ends the run."""

    batches: tuple[Any, ...]
    rejected: tuple[Rejected, ...] = ()
    error: UserError | None = None


@dataclass(frozen=True)
class MakeBatches:
    """Prepares some rows of a step and collates them."""

    processor: OmniProcessor | None  # None: `collate` gets the rows of the dataset
    collate: Collate
    max_tokens: int | None  # longer samples are rejected; None: no limit
    pack_tokens: int | None  # make packs of at most so many tokens; None: one micro-batch of all rows
    without_tails: bool
    alone: bool = False  # micro-batches have one row each
    seed: int = 0  # of the numbers that components draw for a sample

    def __call__(self, rows: Sequence[tuple[int, Any]]) -> MicroBatches:
        """Make micro-batches of rows with their positions in the global data order."""
        try:
            prepared = [self._seeded(self._prepared(index, row)) for index, row in rows]
        except UserError as error:
            return MicroBatches((), error=error)
        rejected = tuple(one for one in prepared if isinstance(one, Rejected))
        kept = [
            (index, piece)
            for (index, _), one in zip(rows, prepared, strict=True)
            if not isinstance(one, Rejected)
            for piece in (one.pieces if isinstance(one, Sample) else [one])  # a long document has several
        ]
        groups: Iterable[list[tuple[int, Any]]] = [kept]
        if self.alone:
            groups = [[one] for one in kept]
        elif self.pack_tokens is not None:
            groups = packed(kept, self.pack_tokens)
        return MicroBatches(tuple(map(self._collated, filter(None, groups))), rejected)

    def _seeded(self, prepared: Any) -> Any:
        """Give a sample and its further pieces the seed; prompts have none."""
        if not isinstance(prepared, Sample) or prepared.seed is None:
            return prepared
        return replace(prepared, seed=self.seed, more=tuple(replace(one, seed=self.seed) for one in prepared.more))

    def _prepared(self, index: int, row: Any) -> Any:
        if self.processor is not None:
            row = row if isinstance(row, Row) else _row_of(row, index)
            return self.processor.sample(row, index, self.max_tokens, without_tail=self.without_tails)
        if isinstance(row, Sample):
            row = replace(row, index=index)
        elif self.max_tokens is not None and isinstance(self.collate, OmniDataCollatorWithPacking):
            row = self.collate.sample(row, index)
        if isinstance(row, Sample) and self.max_tokens is not None and len(row) > self.max_tokens:
            reason = f"{len(row)} tokens, but a pack holds at most {self.max_tokens}"
            return Rejected(row.id, row.source, reason, index, is_overlong=True)
        return row

    def _collated(self, rows: Sequence[tuple[int, Any]]) -> Any:
        indices, values = zip(*rows, strict=True)
        if isinstance(self.collate, OmniDataCollatorWithPacking):
            return self.collate(values, indices)
        return self.collate(list(values))


def packed(samples: Sequence[tuple[int, Sample]], tokens: int) -> Iterator[list[tuple[int, Sample]]]:
    """Yield the samples of dense packs of at most ``tokens`` tokens, each sample once."""
    budget, held = PackBudget(tokens), [sample for _, sample in samples]
    while held:
        chosen = fill_pack(held, budget)
        yield [(sample.index, sample) for sample in chosen]
        taken = set(map(id, chosen))
        held = [sample for sample in held if id(sample) not in taken]


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
    left = dict(record)
    row, media = row_of(left, columns, name, "dataset")

    def content() -> dict[str, Any]:
        messages, files = Schema(columns).conversation(left, media)
        return {"messages": messages, "media": files}

    return row.with_content(content)


_MAX_FAILURES = 1000  # consecutive rejected rows


class MapDataset(Protocol):
    """A map-style dataset, such as ``torch.utils.data.Dataset``, ``datasets.Dataset`` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class _MapSteps(Dataset[list[MicroBatches]]):
    """The micro-batches of a rank in each step, from a map-style dataset."""

    dataset: MapDataset
    make: MakeBatches
    draws: Callable[[int], list[list[tuple[int, int]]]]  # step -> (index in the order of all epochs, row) of its parts

    def __getitem__(self, step: int) -> list[MicroBatches]:
        return [self.make([(index, self.dataset[row]) for index, row in part]) for part in self.draws(step)]


class _StreamSteps(IterableDataset[list[MicroBatches]]):
    """The same, from an iterable dataset that every rank reads as a whole."""

    def __init__(
        self, dataset: Iterable[Any], make: MakeBatches, first: int, size: int, parts: Sequence[slice]
    ) -> None:
        """Drop ``first`` rows. Of every ``size`` rows that follow, make a micro-batch of each of ``parts``."""
        self.dataset, self.make, self.first, self.size = dataset, make, first, size
        self.part_of = {position: number for number, part in enumerate(parts) for position in range(size)[part]}

    def __iter__(self) -> Iterator[list[MicroBatches]]:
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
        micro_batch_size: int | None = None,
        pack_tokens: int | None = None,
        global_batch_size: int | None = None,
        collate_fn: Collate | Sequence[Collate] | None = None,
        shuffle: bool | None = None,
        num_workers: int = 0,
        seed: int = 0,
        max_tokens: int | None = None,
        without_tails: bool = False,
        alone: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """Check the arguments.

        Args:
            dataset: any map-style or iterable dataset of rows.
            processor: turns data rows into samples; see :func:`~omnitrain.data.loading.loader.build_dataloader`.
            micro_batch_size: rows of a micro-batch.
            pack_tokens: in place of it, the most tokens of a micro-batch. Each rank packs its share of the rows of a
                step. Longer samples are skipped.
            global_batch_size: rows of an optimizer step over all ranks, a multiple of ``micro_batch_size`` and at least
                one micro-batch for each rank. By default each rank has one micro-batch.
            collate_fn: makes a micro-batch of a list of rows (or a list with this function). By default an
                :class:`~omnitrain.data.render.packing_collator.OmniDataCollatorWithPacking`.
            shuffle: shuffle the rows of each epoch, by ``seed``; by default only of a map-style dataset. An iterable
                dataset is read in its own order.
            num_workers: processes that prepare and collate; at most 1 for an iterable dataset.
            seed: seed of the order, of what workers draw, and of the noise of decoders.
            max_tokens: with a processor, samples that are longer are skipped.
            without_tails: with a processor, see :meth:`Sample.without_tail`.
            alone: make micro-batches of one row each, for a model that cannot keep several samples apart.
            rank: ``dp_rank`` of the parallel state; required on several ranks.
            ranks: ``dp_size`` of it.

        Raises DataError: the dataset has no rows; UserError: the sizes do not fit the ranks, or ``dataset`` is none.
        """
        rank, ranks = _rank_and_ranks(rank, ranks)
        self.global_batch_size, self._parts = _step_and_parts(
            micro_batch_size, pack_tokens, global_batch_size, rank, ranks
        )
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
        self._num_workers, self._seed, self._rank = num_workers, seed, rank
        self._shuffles = self._is_map if shuffle is None else shuffle
        collate = _one(collate_fn) or OmniDataCollatorWithPacking()
        if pack_tokens is not None and not isinstance(collate, OmniDataCollatorWithPacking):
            raise UserError("collate_fn: with pack_tokens it must be an OmniDataCollatorWithPacking, or not be given")
        most = max_tokens if pack_tokens is None else min(pack_tokens, max_tokens or pack_tokens)
        self._make = MakeBatches(processor, collate, most, pack_tokens, without_tails, alone)
        self.epoch = self.steps = 0
        self.rejected: dict[str, Rejected] = {}
        self._failures = 0

    def __len__(self) -> int:
        """Return the steps of an epoch; TypeError: the dataset is iterable, so its length is unknown."""
        return math.ceil(len(self._dataset) / self.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step, the same on all ranks and valid for any number of them."""
        rows = self.steps * self.global_batch_size
        length = len(self._dataset) if self._is_map else None
        seed = self._seed if self._shuffles else None
        return {"epoch": self.epoch, "steps": self.steps, "rows": rows, "length": length, "seed": seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after :meth:`state_dict`'s step; UserError: its steps had other rows."""
        own = self.state_dict()
        if own["seed"] != state["seed"]:
            raise UserError(
                f"shuffle, seed: found the seed {own['seed']}, but the state is of {state['seed']}; pass those that "
                "the run began with (None: rows are not shuffled)"
            )
        if own["length"] != state["length"]:
            raise UserError(
                f"dataset: found {own['length']} rows, but the state is of {state['length']} rows; pass the dataset "
                "that the run began with (None: it is iterable)"
            )
        if state["rows"] != state["steps"] * self.global_batch_size:
            raise UserError(
                f"global_batch_size: found {self.global_batch_size}, but the state has {state['steps']} steps of "
                f"{state['rows']} rows; pass the one that the run began with"
            )
        self.epoch, self.steps = state["epoch"], state["steps"]

    def __iter__(self) -> Iterator[list[Any]]:
        steps: Dataset[list[MicroBatches]]
        if self._is_map:
            make = replace(self._make, seed=self._seed)
            steps, order = _MapSteps(self._dataset, make, self._draws), range(self.steps, len(self))
        else:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(self.epoch)
            size, order = self.global_batch_size, None
            make = replace(self._make, seed=mixed_seed(self._seed, self.epoch))  # rows count from 0 in each epoch
            steps = _StreamSteps(self._dataset, make, self.steps * size, size, self._parts)
        # Random transforms of rows differ between epochs, ranks and resumes. With the global generator, `DataLoader`
        # would advance what dropout uses.
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, self._rank, self.epoch, self.steps))
        options: dict[str, Any] = {"num_workers": self._num_workers, "worker_init_fn": follow_main_process}
        for made in DataLoader(steps, batch_size=None, sampler=order, generator=generator, **options):
            self.advance()
            yield [batch for micro_batches in made for batch in self._checked(micro_batches).batches]
        self.advance(is_end=True)

    def advance(self, *, is_end: bool = False) -> None:
        """Count a step, or an epoch that ends; a rank that draws no rows calls it to count as those that do."""
        self.epoch, self.steps = (self.epoch + 1, 0) if is_end else (self.epoch, self.steps + 1)

    def _draws(self, step: int) -> list[list[tuple[int, int]]]:
        """Return the index in the order of all epochs, and the row, of what each micro-batch of this rank has."""
        start, length = step * self.global_batch_size, len(self._dataset)
        positions = np.arange(start, min(start + self.global_batch_size, length))
        indices = positions + self.epoch * length
        rows = self._order.rows(indices, self._seed) if self._shuffles else positions
        draws = list(zip(indices.tolist(), rows.tolist(), strict=True))
        return [draws[part] for part in self._parts if draws[part]]

    def _checked(self, made: MicroBatches) -> MicroBatches:
        """Count rejected rows, and raise the error of a row that the model cannot use."""
        if made.error is not None:
            raise made.error
        self.rejected.update({row.id: row for row in made.rejected})
        self._failures = 0 if made.batches else self._failures + len(made.rejected)
        if self._failures >= self._most_failures:
            last = made.rejected[-1]
            raise DataError(f"all of {self._failures} rows were rejected; the last, {last.id!r}: {last.reason}")
        return made


def _one(collate_fn: Collate | Sequence[Collate] | None) -> Collate | None:
    """Return the collate function, which may be the only one of a list."""
    if collate_fn is None or callable(collate_fn):
        return collate_fn
    if not isinstance(collate_fn, (list, tuple)) or len(collate_fn) != 1 or not callable(collate_fn[0]):
        raise UserError(
            f"collate_fn: found {collate_fn!r}; expected a function that makes a micro-batch of a list of rows, or a "
            "list with one such function"
        )
    return collate_fn[0]


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


def _step_and_parts(
    micro_batch_size: int | None, pack_tokens: int | None, global_batch_size: int | None, rank: int, ranks: int
) -> tuple[int, list[slice]]:
    """Return the rows of a step, and which of them this rank prepares: each micro-batch, or all rows that it packs."""
    if (micro_batch_size is None) == (pack_tokens is None):
        raise UserError(
            f"micro_batch_size, pack_tokens: found {micro_batch_size} and {pack_tokens}; with a dataset pass one of "
            "them: the rows of a micro-batch, or the most tokens of a pack"
        )
    size = global_batch_size
    if micro_batch_size is None:
        if size is None or size < ranks:
            raise UserError(
                f"global_batch_size: found {size}; expected the rows of a step over all ranks, {ranks} or more"
            )
        number = ranks
    else:
        size = micro_batch_size * ranks if size is None else size
        if micro_batch_size < 1 or size % micro_batch_size:
            raise UserError(
                f"global_batch_size: found {size}; expected a multiple of micro_batch_size {micro_batch_size}"
            )
        number = size // micro_batch_size
        if number < ranks:
            raise UserError(
                f"global_batch_size: {size} samples are {number} micro-batches of {micro_batch_size}, but {ranks} "
                f"ranks need at least one each; raise it to {ranks * micro_batch_size}"
            )
    slots = share_of_rank(rank, ranks, number).slots
    return size, [slice(slot * size // number, (slot + 1) * size // number) for slot in slots]


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
