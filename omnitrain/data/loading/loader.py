"""Make the packs of each step in background processes, from samples in global order; resumable to the sample."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np

from omnitrain.data.loading.data_process import run_ahead
from omnitrain.data.loading.dataset_loader import DatasetLoader, MapDataset
from omnitrain.data.loading.order import SampleOrder, SourceShare
from omnitrain.data.loading.packer import SlotPacker
from omnitrain.data.loading.row_processes import PreparedRows, SlotRows, prepare_some
from omnitrain.data.loading.slots import LoaderState, MadeStep, RankShare, SameSamples, SlotState, Swap, share_of_rank
from omnitrain.data.packing.budget import PackBudget, balanced_shares
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor, dropped_kinds
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import DataError, UserError
from omnitrain.peers import SINGLE_PROCESS, Peers, all_or_raise
from omnitrain.recipe import Data
from omnitrain.recipe.data import Overlong
from omnitrain.recipe.suggest import hint

_PACKS_AHEAD = 4
# Arguments of VeOmni's function of this name that have no effect here.
_FOREIGN = {
    *("dataloader_type", "dataloader_batch_size", "max_seq_len", "train_steps", "rmpad", "rmpad_with_pos_ids"),
    *("dyn_bsz", "dyn_bsz_margin", "dyn_bsz_buffer_size", "bsz_warmup_ratio", "bsz_warmup_init_mbtoken"),
    *("build_collate_fn", "collate_fn_kwargs", "drop_last", "pin_memory", "prefetch_factor"),
}
_MEASURED_ROWS = 64  # of each source, for weights by tokens
_FIRST_ROWS = 16  # of each source; one of them must be usable

Packs = tuple[Pack, ...]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a rank makes its steps. Their samples follow from the recipe, ``seed`` and ``slots``, not from ``ranks``."""

    seed: int = 0  # seed of the data order
    state: LoaderState | None = None  # to resume from: of :meth:`StepLoader.state`, merged if there are several ranks
    alone: bool = False  # packs of one sample, for a model that keeps no samples apart (`runner.contract.packs`)
    without_tails: bool = False  # skip tokens after the last one that a loss reads (`runner.contract.without_tails`)
    slots: int = 1  # packs of a step over all ranks, the recipe's ``train.packs_per_step``
    rank: int | None = 0  # rank among the ranks that draw data; None: it draws none, and its steps have no packs
    ranks: int = 1  # that draw data; see :func:`~omnitrain.data.loading.slots.share_of_rank`
    idle: Sample | None = None  # with nothing to predict, for a rank without samples; needed with more ranks than slots
    # Makes a step from the rank's packs (None: their tuple), in the process that packs; picklable, as are its results.
    # A context manager is entered before the first row is read, and exited at the end, also after an error.
    then: Callable[[Packs], Any] | None = None
    peers: Peers = SINGLE_PROCESS  # all ranks of the run, which then all call this
    media_names: Mapping[str, Sequence[str]] | None = None  # `media_of_data` of the model, for `data.pack_elements`
    # Sends a parcel to each of `peers` and returns theirs (:meth:`DataProcessGroup.swap`): one of the ranks that hold
    # the same samples prepares them for all. None: each rank prepares its own.
    swap: Swap | None = None


@dataclass(frozen=True)
class _Steps:
    """Makes the steps of one rank. It can be pickled to another process."""

    data: Data
    order: SampleOrder
    rows: PreparedRows
    share: RankShare
    slots: Mapping[int, SlotState]  # of the rank, at the start
    alone: bool
    budget: PackBudget
    idle: Sample | None
    then: Callable[[Packs], Any] | None
    same: SameSamples | None  # if one of several ranks prepares their samples

    def make(self) -> Generator[MadeStep, None, None]:
        """Yield steps without end; UserError: unusable data; TrainingError: a process or another rank failed."""
        context = self.then if isinstance(self.then, AbstractContextManager) else contextlib.nullcontext()
        with context, contextlib.closing(self._packed()) as own:
            steps: Generator[MadeStep, None, None] = own
            if self.same is not None:
                steps = self.same.send(own) if self.same.is_first else self.same.receive()
            for step in steps:
                (packs,) = step.made
                yield replace(step, made=self.then(packs) if self.then else packs)

    def _packed(self) -> Generator[MadeStep, None, None]:
        """Yield the packs of each share of the slots. Without ``same``, that is the share of this rank only."""
        draws = {
            slot: chain(
                [self.order.draw(index, state.begun) for index in state.held],
                self.order.draws(state.next_index, state.begun),
            )
            for slot, state in self.slots.items()
        }
        fatal = {
            slot: {self.order.draw(row.index, state.begun)[1:]: row for row in state.fatal}
            for slot, state in self.slots.items()
        }
        # A row that hangs must not take the process with it that packs.
        helpers, is_ahead = max(self.data.workers - 1, int(self.rows.may_hang)), self.data.workers > 0
        with SlotRows(self.rows, draws, helpers, is_ahead=is_ahead, fatal=fatal) as rows:
            packers = [
                SlotPacker(self.data, self.order, rows, slot, state, self.alone, self.budget)
                for slot, state in self.slots.items()
            ]
            num_shares, minimal = self.share.num_shares, [] if self.idle is None else [self.idle]
            wanted = [self.share.share] if self.same is None else range(num_shares)
            while True:
                of_slots = [balanced_shares(packer.choose(), num_shares) for packer in packers]
                shares = tuple(
                    tuple(Pack.from_samples(of_slot[share] or minimal) for of_slot in of_slots) for share in wanted
                )
                slots = {slot: packer.state for slot, packer in zip(self.slots, packers, strict=True)}
                rejected = tuple(row for packer in packers for row in packer.take_rejected())
                yield MadeStep(shares, slots, rejected)


class StepLoader:
    """The training data of one rank: endless optimizer steps.

    Iterate it once. It yields the results of ``then`` for the rank's packs of each step. :meth:`state` after a step
    resumes exactly after that step.

    Attributes:
        sources: the open data sets.
        order: order of their rows.
        rows: prepares the rows.
        rejected: id -> row that this rank has skipped so far, after rows of the state from which it continues. Of
            ranks that hold the same samples, the rank that prepares them has these rows.
        reasons: source -> kind of reason -> number of these rows, each counted in its first epoch.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        processor: OmniProcessor,
        data: Data,
        options: LoaderOptions = LoaderOptions(),
    ) -> None:
        """Prepare a rank's steps from open data sets; UserError: ``data.pack_elements`` has an unknown name."""
        rank, ranks, slots, peers = options.rank, options.ranks, options.slots, options.peers
        share, start = share_of_rank(rank, ranks, slots), options.state or LoaderState()
        if share.num_shares > 1 and options.idle is None:
            raise ValueError(f"{ranks} ranks share {slots} packs: pass `idle` for ranks whose share is empty")
        self.sources = sources
        budget = PackBudget(data.pack_tokens, data.pack_elements, options.media_names or {})
        self.rows = PreparedRows(
            sources,
            processor,
            budget,
            data.cached_samples,
            options.without_tails,
            data.overlong_of_sources(),
            dropped=partial(dropped_kinds, data.condition_dropout, options.seed),
            seed=options.seed,
        )
        if data.weights_by == "tokens" and not start.tokens_per_draw:
            # One rank measures: a file that only some ranks cannot read must not give them another order.
            tokens = all_or_raise(
                peers, lambda: _tokens_per_draw(sources, data, self.rows, options.seed) if peers.rank == 0 else ()
            )
            start = replace(start, tokens_per_draw=peers.of_first(tokens))
        self._start = start
        self.order = order_of(sources, data, options.seed, slots, start.tokens_per_draw)
        for source, skipped in zip(sources, start.skipped, strict=False):
            if isinstance(source, RowSource):  # in tests, rows are samples already
                source.skip(skipped)
        self.rejected = {row.id: row for row in start.rejected}
        self.reasons: dict[str, Counter[str]] = {}
        self._count(start.rejected)
        self._listed = tuple(self.rejected.values())
        swap = options.swap
        same = None if swap is None else SameSamples.of(peers.gather(rank), ranks, slots, peers.rank, swap)
        states = {slot: start.of_slot(slot) for slot in share.slots}
        self._steps = _Steps(
            data, self.order, self.rows, share, states, options.alone, budget, options.idle, options.then, same
        )

    def state(self) -> LoaderState:
        """Return the states of this rank's slots after the last step; see ``slots.merge_states``."""
        return replace(self._start, slots=self._steps.slots, rejected=self._listed, skipped=self._skipped())

    def _skipped(self) -> tuple[int, ...]:
        """Return the first rows of each stream that no slot of this rank needs again; 0 of other sources."""
        order, slots = self.order, self._steps.slots.values()
        if not any(source.in_order for source in order.sources):
            return ()
        needed = [
            min((order.first_needed(n, slot.next_index, slot.held, slot.begun) for slot in slots), default=0)
            for n in range(len(order.sources))
        ]
        shares = zip(order.sources, needed, strict=True)
        return tuple(rows if one.in_order and rows < one.length else 0 for one, rows in shares)

    @property
    def num_rejected(self) -> dict[int, Mapping[str, int]]:
        """Slot -> source -> rows that were skipped in the slot so far; only slots and sources with any."""
        return {slot: state.rejected for slot, state in self._steps.slots.items() if state.rejected}

    def __iter__(self) -> Generator[Any, None, None]:
        make, depth = self._steps.make, -(-_PACKS_AHEAD // max(1, len(self._steps.slots)))
        # Close explicitly: processes that the garbage collector ends hang for five seconds.
        with contextlib.closing(run_ahead(make, depth) if self._steps.data.workers else make()) as stream:
            for loaded in stream:
                self._steps = replace(self._steps, slots=loaded.slots)
                if loaded.rejected:
                    self._count([row for row in loaded.rejected if self._is_new(row, loaded.slots)])
                    self.rejected.update({row.id: row for row in loaded.rejected})
                    self._listed = tuple(self.rejected.values())
                yield loaded.made

    def _is_new(self, row: Rejected, slots: Mapping[int, SlotState]) -> bool:
        begun = slots[row.index % self.order.slots].begun
        return row.id not in self.rejected and self.order.is_first(row.index, begun)

    def _count(self, rejected: Sequence[Rejected]) -> None:
        for row in rejected:
            self.reasons.setdefault(row.source, Counter())[row.kind_of_reason] += 1


def order_of(
    sources: Sequence[Sized],
    data: Data,
    seed: int,
    slots: int,
    tokens_per_draw: Sequence[float] = (),
    *,
    mixes_epochs: bool = False,
) -> SampleOrder:
    """Return the order of a run's samples, from ``sources``, the rows of each data set of ``data.train``."""
    shares = _shares(sources, data, tokens_per_draw or [1.0] * len(sources))
    return SampleOrder(shares, seed, slots, [stage.from_step for stage in data.stages], mixes_epochs=mixes_epochs)


def _shares(sources: Sequence[Sized], data: Data, tokens_per_draw: Sequence[float]) -> list[SourceShare]:
    weights = zip(*data.stage_weights(), strict=True)
    together = zip(order_names(data), sources, data.train, weights, tokens_per_draw, strict=True)
    return [
        SourceShare(
            name,
            len(source),
            tuple(weight / tokens for weight in of_stages),
            node.epochs,
            getattr(source, "blocks", ()),  # a plain sequence of rows has none
            getattr(source, "is_stream", False),
        )
        for name, source, node, of_stages, tokens in together
    ]


def order_names(data: Data) -> list[str]:
    """Return a unique name of each training data set: the recipe's, or the file's, and the number of those before."""
    names = [source.name or Path(source.path).stem for source in data.train]
    return [f"{name} {names[:place].count(name)}" for place, name in enumerate(names)]


def _tokens_per_draw(sources: Sequence[RowSource], data: Data, rows: PreparedRows, seed: int) -> tuple[float, ...]:
    """Return the mean tokens of the first draws of each source; rows that training skips have none."""
    means = []
    for number, share in enumerate(_shares(sources, data, [1.0] * len(sources))):
        first = share.rows(np.arange(min(_MEASURED_ROWS, share.length)), seed).tolist()
        drawn = prepare_some(rows, [(i, number, row) for i, row in enumerate(first)])
        if mistake := next((one for one in drawn if isinstance(one, UserError)), None):
            raise mistake
        tokens = sum(len(piece) for one in drawn if isinstance(one, Sample) for piece in one.pieces)
        if not tokens:
            raise DataError(
                f"data.train.{number}: none of its first {len(drawn)} rows can be used, so `weights_by: tokens` knows "
                "no length of its samples; remove the data set, or mend its rows (`omnitrain check` says why)"
            )
        means.append(tokens / len(drawn))
    return tuple(means)


def first_samples(
    sources: Sequence[RowSource],
    processor: OmniProcessor,
    budget: PackBudget | None = None,
    overlong: Sequence[Overlong] | None = None,
    *,
    without_tails: bool = False,
    may_ask: bool = False,
) -> list[tuple[str, Sample | Rejected | UserError]]:
    """Prepare the first usable row of each metrics source (else the first row), with the source's name."""
    rows = PreparedRows(sources, processor, budget, without_tails=without_tails, overlong=overlong, may_ask=may_ask)
    groups = [(s, name, group) for s, table in enumerate(sources) for name, group in table.by_source().items()]
    firsts = prepare_some(rows, [(0, s, group[0]) for s, _, group in groups])
    found = []
    for (s, name, group), first in zip(groups, firsts, strict=True):
        others = range(1, min(len(group), _FIRST_ROWS) if isinstance(first, Rejected) else 1)
        tried = prepare_some(rows, [(i, s, group[i]) for i in others]) if others else []
        found.append((name, next((one for one in tried if not isinstance(one, Rejected)), first)))
    return found


def require_usable(sources: Sequence[RowSource], processor: OmniProcessor) -> None:
    """Prepare the first row of each kind; UserError: one line for each way the model cannot use the data."""
    rows = PreparedRows(sources, processor, budget=None)
    firsts = [(s, position) for s, table in enumerate(sources) for position in table.first_of_each_kind()]
    tried = prepare_some(rows, [(i, s, position) for i, (s, position) in enumerate(firsts)])
    problems = dict.fromkeys(str(result) for result in tried if isinstance(result, UserError))
    if problems:
        raise UserError(*problems)


@overload
def build_dataloader(data: Data, processor: OmniProcessor, **options: Any) -> StepLoader: ...


@overload
def build_dataloader(
    data: MapDataset | Iterable[Any], processor: OmniProcessor | None = None, **options: Any
) -> DatasetLoader: ...
@overload
def build_dataloader(*, dataset: MapDataset | Iterable[Any], **options: Any) -> DatasetLoader: ...
def build_dataloader(
    data: Any = None, processor: OmniProcessor | None = None, *, dataset: Any = None, **options: Any
) -> StepLoader | DatasetLoader:
    """Build the loader of a training loop: optimizer steps of one rank, the same samples on any number of ranks.

    With the ``data`` of a recipe, packs are filled up to ``data.pack_tokens``, without end. With a dataset, a step has
    ``global_batch_size`` rows, in micro-batches of a number of rows or tokens; iterating the loader once is one epoch.

    Args:
        data: the ``data`` node of a recipe, or any map-style or iterable dataset of rows.
        processor: turns data rows into samples. With a dataset, its rows are then dicts (``messages``, ``images``,
            ``audios``, ``videos``, ``tools``, ``system``, ``id``, ``task``) or :class:`Row`. None: ``collate_fn`` gets
            the rows of the dataset as they are.
        dataset: another name of ``data``.
        **options: with a recipe's data the fields of :class:`LoaderOptions`; with a dataset the arguments of
            :class:`~omnitrain.data.loading.dataset_loader.DatasetLoader`.

    Raises DataError: a data set is missing, empty, or lacks a column; UserError: the sizes do not fit the ranks, or
    ``data`` is no dataset.
    """
    if (data is None) == (dataset is None):
        raise UserError("data: expected the `data` of a recipe, or a dataset (`dataset=`)")
    data = dataset if data is None else data
    if foreign := sorted(_FOREIGN & options.keys()):
        raise UserError(
            f"{', '.join(foreign)}: arguments of another library; remove them, and pass pack_tokens=, the most tokens "
            "of a pack, or micro_batch_size=, its rows"
        )
    if isinstance(data, Data):
        processor = _required(processor, options)
        return StepLoader(open_sources(data.train), processor, data, LoaderOptions(**options))
    _require_known(options, DatasetLoader)
    return DatasetLoader(data, processor, **options)


def _required(processor: OmniProcessor | None, options: Mapping[str, Any]) -> OmniProcessor:
    """Return the processor, which the ``data`` of a recipe needs, or raise UserError, also for other options."""
    if processor is None:
        raise UserError("processor: the `data` of a recipe needs an OmniProcessor, which turns its rows into samples")
    if given := sorted({"micro_batch_size", "pack_tokens", "global_batch_size", "collate_fn"} & options.keys()):
        raise UserError(
            f"{given[0]}: the `data` of a recipe fills packs up to data.pack_tokens, `slots` packs in a step; for a "
            "fixed number of rows pass one data set, as ot.data.open_sources(recipe.data.train)[0]"
        )
    _require_known(options, LoaderOptions)
    return processor


def _require_known(options: Mapping[str, Any], loader: Callable[..., Any]) -> None:
    known = signature(loader).parameters.keys() - {"dataset", "processor"}
    if unknown := sorted(options.keys() - known):
        raise UserError(f"{unknown[0]}: build_dataloader has no such argument for this data; {hint(unknown[0], known)}")
