"""Make micro-batches of the rows of a dataset, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.fill_pack import fill_pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row, row_of
from omnitrain.data.sources.schema import Schema
from omnitrain.errors import UserError
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

    def __call__(self, rows: Sequence[tuple[int, Any]]) -> MicroBatches:
        """Make micro-batches of rows with their positions in the global data order."""
        try:
            prepared = [self._prepared(index, row) for index, row in rows]
        except UserError as error:
            return MicroBatches((), error=error)
        rejected = tuple(one for one in prepared if isinstance(one, Rejected))
        kept = [
            (index, piece)
            for (index, _), one in zip(rows, prepared, strict=True)
            if not isinstance(one, Rejected)
            for piece in (one.pieces if isinstance(one, Sample) else [one])  # a long document has several
        ]
        groups = [kept] if self.pack_tokens is None else packed(kept, self.pack_tokens)
        return MicroBatches(tuple(map(self._collated, filter(None, groups))), rejected)

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
