"""Samples in global order -> the packs of each step, made ahead in background processes, resumable to the sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from omnitrain.data.ahead import run_ahead
from omnitrain.data.order import Draw, SampleOrder
from omnitrain.data.pack import Pack
from omnitrain.data.packer import SlotPacker
from omnitrain.data.packing import balanced_shares
from omnitrain.data.prepared import PreparedRows, SlotRows
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.data.sample import Rejected, Sample
from omnitrain.data.slots import LoaderState, RankShare, SlotState, share_of_rank
from omnitrain.errors import UserError
from omnitrain.recipe import Data

_PACKS_AHEAD = 4

Packs = tuple[Pack, ...]


@dataclass(frozen=True)
class _Made:
    """A step of one rank, and what making it changed: where the rank's slots stand, and rows newly rejected."""

    step: Any
    slots: Mapping[int, SlotState]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class _Steps:
    """What it takes to make the steps of one rank; it can travel to another process.

    Attributes:
        data: the recipe's ``data`` node.
        order: of the samples, over all slots of the run.
        rows: prepares them.
        share: what the rank packs.
        slots: slot of the rank -> where it begins.
        alone: one sample per pack.
        idle: stands in where the rank's share of a pack is empty.
        then: makes the step of the packs; None: they are the step. Entered, where it is a context.
    """

    data: Data
    order: SampleOrder
    rows: PreparedRows
    share: RankShare
    slots: Mapping[int, SlotState]
    alone: bool
    idle: Sample | None
    then: Callable[[Packs], Any] | None

    def make(self) -> Generator[_Made, None, None]:
        """Steps without end. Of ``data.workers`` processes one runs this, and the others prepare rows for it.

        Raises:
            UserError: data of no use to the model.
            TrainingError: a process that prepares rows was killed.
        """
        draws = {slot: self._draws(state) for slot, state in self.slots.items()}
        around = self.then if isinstance(self.then, AbstractContextManager) else contextlib.nullcontext()
        with around, SlotRows(self.rows, draws, helpers=max(0, self.data.workers - 1)) as rows:
            packers = {slot: self._packer(state, partial(rows.take, slot)) for slot, state in self.slots.items()}
            while True:
                packs = tuple(self._pack(packer.choose()) for packer in packers.values())
                slots = {slot: packer.state for slot, packer in packers.items()}
                rejected = tuple(row for packer in packers.values() for row in packer.take_rejected())
                yield _Made(self.then(packs) if self.then else packs, slots, rejected)

    def _draws(self, state: SlotState) -> Iterator[Draw]:
        return chain((self.order[index] for index in state.held), self.order.draws(state.next_index))

    def _packer(self, state: SlotState, take: Callable[[], Sample | Rejected]) -> SlotPacker:
        return SlotPacker(self.data, self.order, take, state, self.alone)

    def _pack(self, chosen: list[Sample]) -> Pack:
        own = balanced_shares(chosen, self.share.num_shares)[self.share.share]
        return Pack.from_samples(own if own or self.idle is None else [self.idle])


class StepLoader:
    """The training data of one rank: endless optimizer steps.

    Iterate it once. An item is what ``then`` made of the rank's packs of a step; :meth:`state` after it continues
    exactly behind that step.

    Attributes:
        sources: the open data sets.
        order: of their rows.
        rows: prepares them.
        rejected: rows skipped so far, by id.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        data: Data,
        *,
        seed: int,
        state: LoaderState | None = None,
        alone: bool = False,
        without_tails: bool = False,
        slots: int = 1,
        rank: int = 0,
        ranks: int = 1,
        idle: Sample | None = None,
        then: Callable[[Packs], Any] | None = None,
    ) -> None:
        """See :func:`build_dataloader`."""
        share, begin = share_of_rank(rank, ranks, slots), state or LoaderState()
        if share.num_shares > 1 and idle is None:
            raise ValueError(f"{ranks} ranks share {slots} packs: give `idle`, for ranks whose share is empty")
        self.sources = sources
        self.order = SampleOrder([len(s) for s in sources], [s.weight for s in data.train], seed, slots)
        self.rows = PreparedRows(sources, processor, data.pack_tokens, data.cached_samples, without_tails)
        self.rejected = {row.id: row for row in begin.rejected}
        own = {slot: begin.of_slot(slot) for slot in share.slots}
        self._steps = _Steps(data, self.order, self.rows, share, own, alone, idle, then)

    def state(self) -> LoaderState:
        """How the step handed out last left this rank's slots; see :func:`omnitrain.data.slots.merge_states`."""
        return LoaderState(self._steps.slots, tuple(self.rejected.values()))

    def __iter__(self) -> Generator[Any, None, None]:
        make, depth = self._steps.make, -(-_PACKS_AHEAD // len(self._steps.slots))
        # Closed by name: processes that the garbage collector has to end hang for five seconds.
        with contextlib.closing(run_ahead(make, depth) if self._steps.data.workers else make()) as stream:
            for made in stream:
                self._steps = replace(self._steps, slots=made.slots)
                self.rejected.update({row.id: row for row in made.rejected})
                yield made.step


def first_samples(
    sources: Sequence[RowSource], processor: OmniProcessor
) -> list[tuple[str, Sample | Rejected | UserError]]:
    """Of each data set the first row of every source of metrics, prepared, with that source's name.

    Tells within moments whether a model can use the data.
    """
    rows = PreparedRows(sources, processor, max_tokens=None)
    groups = ((s, name, group) for s, table in enumerate(sources) for name, group in table.by_source().items())
    return [(name, rows[0, s, group[0]]) for s, name, group in groups]


def require_usable(sources: Sequence[RowSource], processor: OmniProcessor) -> None:
    """Prepare the first row of each kind (:meth:`RowSource.first_of_each_kind`).

    What no component can read or write is found before training, however late in the data it comes.

    Raises:
        UserError: what the model cannot do with the data, a line each.
    """
    rows = PreparedRows(sources, processor, max_tokens=None)
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
    without_tails: bool = False,
    slots: int = 1,
    rank: int = 0,
    ranks: int = 1,
    idle: Sample | None = None,
    then: Callable[[Packs], Any] | None = None,
) -> StepLoader:
    """The optimizer steps of a recipe, or one rank's part of them.

    What is in a step follows from ``data``, ``seed`` and ``slots`` alone: the ranks of any number of ranks have the
    same samples in it together.

    Args:
        data: the recipe's ``data`` node.
        processor: turns rows into samples.
        seed: of the data order.
        state: continue from here: :meth:`StepLoader.state`, or of several ranks the merged one.
        alone: one sample per pack, for a model that cannot keep several apart (``not model.runner.contract.packs``).
        without_tails: the model is not given what comes behind the last token of a sample that a loss reads; for one
            to which that makes no difference (``model.runner.contract.without_tails``).
        slots: packs of a step over all ranks, the recipe's ``train.micro_batches``.
        rank: among the ranks that draw data.
        ranks: how many draw data: a divisor or a multiple of ``slots``. With more of them than slots, the samples of a
            pack are divided among several ranks, by tokens.
        idle: a sample with nothing to predict: the pack of a rank for which a pack has no sample. Needed where there
            are more ranks than slots.
        then: makes of the rank's packs what an iteration hands out, in the process that packs, so it and its results
            can be pickled; by default they are handed out as a tuple. A context manager is entered before a row is
            read, and left at the end, also by an error.

    Raises:
        DataError: a data set that is missing, empty, or lacks a column.
        UserError: ``slots`` and ``ranks`` that do not divide each other.
    """
    return StepLoader(
        open_sources(data.train),
        processor,
        data,
        seed=seed,
        state=state,
        alone=alone,
        without_tails=without_tails,
        slots=slots,
        rank=rank,
        ranks=ranks,
        idle=idle,
        then=then,
    )
