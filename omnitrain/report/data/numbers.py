"""What a recipe's data sets have, in numbers, and how a run would read and pack them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from omnitrain.data.loading.measure import Measure, Measured, Packing, rows_read
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import RowSource
from omnitrain.data.sources.stream import ENDLESS
from omnitrain.recipe import Recipe

LENGTHS = ("min", "mean", "median", "p95", "max")
_BINS = 20


@dataclass(frozen=True)
class DataSetStats:
    """A data set of ``data.train``."""

    name: str  # its name in metrics
    rows: int | None  # its rows; None: it is a stream
    measured: int  # rows that were prepared for these numbers; of these, training skips the ``rejected`` ones
    rejected: int
    share: float  # its share of the rows that a run reads
    epochs: float | None  # how often a run reads each of its rows; None: nothing can be packed, or it is a stream

    @property
    def num_rows(self) -> int | str:
        """Its rows, or ``stream``."""
        return "stream" if self.rows is None else self.rows


@dataclass(frozen=True)
class SourceStats:
    """The samples of a source, by which metrics are split."""

    name: str  # its name
    samples: int  # number of samples that were measured
    rejected: int  # number of rows that were rejected
    length: Mapping[str, float]  # :data:`LENGTHS` of the samples' tokens
    predicted: float  # share of its tokens that the loss has
    tokens: Mapping[str, float]  # ``text``, ``image``, ``image predicted``, ... -> share of its tokens
    items: Mapping[str, float]  # modality -> images, sounds or videos of a sample, on average
    lowered: int  # number of videos that a limit of frames reads at a lower rate

    @property
    def items_in_words(self) -> str:
        """Modalities with their items of a sample."""
        return ", ".join(f"{modality} {count:.3g}" for modality, count in self.items.items())


@dataclass(frozen=True)
class RejectedStats:
    """A number of rows that were rejected for one reason, in which numbers, paths and quoted words are ``...``.

    ``example`` is the id of one of them, and ``words`` say why that one was rejected.
    """

    source: str
    reason: str
    rows: int
    example: str
    words: str


@dataclass(frozen=True)
class PackingStats:
    """Packs as a run fills them: means of ``packs`` that were filled to find out."""

    packs: int  # their number
    fill: float  # share of their room that has tokens
    samples: float  # samples of a pack
    predicted: float  # tokens of a pack that the loss has
    samples_per_step: float  # samples of a step over all ranks
    tokens_per_step: float  # tokens of a step over all ranks


@dataclass(frozen=True)
class Histogram:
    """``edges``: ends of the bins; ``counts``: name -> values in each bin."""

    edges: Sequence[float]
    counts: Mapping[str, Sequence[int]]


@dataclass(frozen=True, repr=False)
class DataNumbers:
    """All numbers."""

    name: str  # name of the recipe
    steps: int  # steps of its run
    packs_per_step: int  # packs of a step over all ranks
    pack_tokens: int  # the most tokens of a pack
    data_sets: Sequence[DataSetStats]  # the data sets
    sources: Sequence[SourceStats]  # the sources in them, by name
    rejected: Sequence[RejectedStats]  # reasons for which rows were rejected; those of most rows first
    packing: PackingStats | None  # how packs are filled; None: all rows were rejected
    lengths: Histogram  # histogram of the samples' tokens, by source
    fills: Histogram  # histogram of the packs' tokens
    unread: Sequence[str] = ()  # keys of the data sets that nothing reads, in words

    @property
    def kinds(self) -> list[str]:
        """What tokens are: ``text``, ``image``, ``image predicted``, ..."""
        return sorted({kind for source in self.sources for kind in source.tokens})

    @property
    def of_lowered(self) -> str:
        """What to say of videos whose rate is lowered; empty if there are none."""
        found = [f"{one.lowered:,} of {one.name}" for one in self.sources if one.lowered]
        return f"videos that `max_frames` reads at a lower rate: {', '.join(found)}" if found else ""

    @classmethod
    def of(
        cls,
        name: str,
        recipe: Recipe,
        sources: Sequence[RowSource],
        measured: Sequence[Sequence[Measured]],
        packing: Packing | None,
        unread: Sequence[str] = (),
    ) -> Self:
        """Return the numbers of a recipe's training data, of which some rows of each set are ``measured``.

        ``packing``: how these rows fill packs; None: all of them were rejected.
        """
        train, room = recipe.train, recipe.data.pack_tokens
        every = [row for rows in measured for row in rows]
        by_source: dict[str, list[Measured]] = {}
        for row in sorted(every, key=lambda row: row.source):
            by_source.setdefault(row.source, []).append(row)
        rows_per_step = train.micro_batches * (1.0 if packing is None else packing.rows_per_pack)
        read = rows_read([*map(len, sources)], measured, recipe.data, train.steps, rows_per_step)
        packs = [] if packing is None else packing.packs
        return cls(
            name=name,
            steps=train.steps,
            packs_per_step=train.micro_batches,
            pack_tokens=room,
            data_sets=[
                _data_set(source, rows, of_source / sum(read), None if packing is None else of_source / len(source))
                for source, rows, of_source in zip(sources, measured, read, strict=True)
            ],
            sources=[_source(one, rows) for one, rows in by_source.items()],
            rejected=_rejected([row for row in every if isinstance(row, Rejected)]),
            packing=None if packing is None else _packing(packing, room, train.micro_batches),
            lengths=_histogram({one: list(map(len, _samples(rows))) for one, rows in by_source.items()}, None),
            fills=_histogram({"packs": [pack.num_tokens for pack in packs]}, room),
            unread=unread,
        )


def _data_set(source: RowSource, rows: Sequence[Measured], share: float, epochs: float | None) -> DataSetStats:
    rejected = sum(isinstance(row, Rejected) for row in rows)
    if len(source) >= ENDLESS:
        return DataSetStats(source.name, None, len(rows), rejected, share, None)
    return DataSetStats(source.name, len(source), len(rows), rejected, share, epochs)


def _samples(rows: Sequence[Measured]) -> list[Measure]:
    """The samples of all rows; a long document has several."""
    return [sample for row in rows if isinstance(row, Measure) for sample in row.pieces]


def _source(name: str, rows: Sequence[Measured]) -> SourceStats:
    samples = _samples(rows)
    lengths = np.array([len(sample) for sample in samples] or [0])
    total = max(1, int(lengths.sum()))
    tokens: Counter[str] = Counter()
    items: Counter[str] = Counter()
    for sample in samples:
        tokens.update(sample.tokens)
        items.update(sample.items)
    return SourceStats(
        name=name,
        samples=len(samples),
        rejected=sum(isinstance(row, Rejected) for row in rows),
        length={
            "min": int(lengths.min()),
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
        },
        predicted=sum(sample.num_predicted for sample in samples) / total,
        tokens={kind: count / total for kind, count in sorted(tokens.items())},
        items={modality: count / len(samples) for modality, count in sorted(items.items())},
        lowered=sum(sample.lowered for sample in samples),
    )


def _rejected(rows: Sequence[Rejected]) -> list[RejectedStats]:
    groups: dict[tuple[str, str], list[Rejected]] = {}
    for row in rows:
        groups.setdefault((row.source, row.kind_of_reason), []).append(row)
    found = (RejectedStats(*kind, len(of_kind), of_kind[0].id, of_kind[0].reason) for kind, of_kind in groups.items())
    return sorted(found, key=lambda one: (-one.rows, one.source, one.reason))


def _packing(packing: Packing, room: int, packs_per_step: int) -> PackingStats:
    packs, count = packing.packs, len(packing.packs)
    tokens = sum(pack.num_tokens for pack in packs)
    samples = sum(pack.num_samples for pack in packs) / count
    return PackingStats(
        packs=count,
        fill=tokens / (count * room),
        samples=samples,
        predicted=sum(pack.num_predicted for pack in packs) / count,
        samples_per_step=samples * packs_per_step,
        tokens_per_step=tokens / count * packs_per_step,
    )


def _histogram(values: Mapping[str, Sequence[int]], end: int | None) -> Histogram:
    """Count whole numbers in at most 20 bins of one width (but the last), from 0 to ``end`` or to the largest."""
    top = end or max((value for of_name in values.values() for value in of_name), default=0)
    edges = [*range(0, top + 1, -(-(top + 1) // _BINS)), top + 1]
    counts = {name: np.histogram(of_name, edges)[0].tolist() for name, of_name in values.items() if len(of_name)}
    return Histogram(edges, counts)
