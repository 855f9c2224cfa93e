"""The numbers of ``omnitrain show --stats``, in a terminal, in a notebook, on a page and in a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from markupsafe import Markup
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from omnitrain.data.loading.measure import Measure, Measured, Packing, rows_read
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import RowSource
from omnitrain.data.sources.stream import ENDLESS
from omnitrain.recipe import Recipe
from omnitrain.report.html import Share, Shown, in_words, rendered, swatch
from omnitrain.report.svg import Bar, draw_bars, draw_histogram

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

    name: str
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
class DataStats(Shown):
    """The numbers of a recipe's data. A notebook shows them as HTML, a terminal as text."""

    title: ClassVar[str] = "statistics of the data"
    name: str  # name of the recipe
    steps: int  # steps of its run
    packs_per_step: int  # packs of a step over all ranks
    pack_tokens: int  # the most tokens of a pack
    data_sets: Sequence[DataSetStats]  # the data sets
    sources: Sequence[SourceStats]  # the sources in them, by name
    rejected: Sequence[RejectedStats]  # reasons for which rows were rejected, the most frequent first
    packing: PackingStats | None  # how packs are filled; None: all rows were rejected
    lengths: Histogram  # histogram of the samples' tokens, by source
    fills: Histogram  # histogram of the packs' tokens
    unread: Sequence[str] = ()  # keys of the data sets that nothing reads, in words

    @property
    def kinds(self) -> list[str]:
        """The kinds of tokens: ``text``, ``image``, ``image predicted``, ..."""
        return sorted({kind for source in self.sources for kind in source.tokens})

    @property
    def of_lowered(self) -> str:
        """A sentence on videos whose rate is lowered; empty if there are none."""
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
        """Return the numbers of training data from ``measured`` rows of each set; ``packing`` None: all rejected."""
        train, room = recipe.train, recipe.data.pack_tokens
        every = [row for rows in measured for row in rows]
        by_source: dict[str, list[Measured]] = {}
        for row in sorted(every, key=lambda row: row.source):
            by_source.setdefault(row.source, []).append(row)
        rows_per_step = train.packs_per_step * (1.0 if packing is None else packing.rows_per_pack)
        read = rows_read([*map(len, sources)], measured, recipe.data, train.steps, rows_per_step)
        packs = [] if packing is None else packing.packs
        return cls(
            name=name,
            steps=train.steps,
            packs_per_step=train.packs_per_step,
            pack_tokens=room,
            data_sets=[
                _data_set(source, rows, of_source / sum(read), None if packing is None else of_source / len(source))
                for source, rows, of_source in zip(sources, measured, read, strict=True)
            ],
            sources=[_source(one, rows) for one, rows in by_source.items()],
            rejected=_rejected([row for row in every if isinstance(row, Rejected)]),
            packing=None if packing is None else _packing(packing, room, train.packs_per_step),
            lengths=_histogram({one: list(map(len, _samples(rows))) for one, rows in by_source.items()}, None),
            fills=_histogram({"packs": [pack.num_tokens for pack in packs]}, room),
            unread=unread,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON has them."""
        return asdict(self)

    def save_json(self, file: str | Path) -> Path:
        """Write the numbers to a JSON file, and return its path."""
        path = Path(file)
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    def tables(self) -> dict[str, tuple[Sequence[str], list[list[Any]]]]:
        """Return titles and rows of the tables that a terminal and a page show."""
        of_sets = ("data set", "rows", "measured", "rejected", "share", f"epochs in {self.steps:,} steps")
        return {
            "sets": (
                of_sets,
                [
                    [one.name, one.num_rows, one.measured, one.rejected, Share(one.share), one.epochs]
                    for one in self.data_sets
                ],
            ),
            "lengths": (
                ("tokens of samples", "samples", "rejected", *LENGTHS),
                [[one.name, one.samples, one.rejected, *map(one.length.get, LENGTHS)] for one in self.sources],
            ),
            "shares": (
                ("share of tokens", "in the loss", *self.kinds, "items of a sample"),
                [[one.name, Share(one.predicted), *self._of_kinds(one), one.items_in_words] for one in self.sources],
            ),
            "rejected": (
                ("source", "rejected rows", "reason", "example"),
                [[one.source, one.rows, one.reason, f"{one.example}: {one.words}"] for one in self.rejected],
            ),
        }

    def _of_kinds(self, source: SourceStats) -> list[Share | None]:
        return [Share(source.tokens[kind]) if kind in source.tokens else None for kind in self.kinds]

    def lines(self) -> Iterator[RenderableType]:
        """Yield tables and histograms."""
        tables = {name: _as_table(*of_name) for name, of_name in self.tables().items()}
        yield from (tables["sets"], tables["lengths"], tables["shares"])
        yield from ([Text(self.of_lowered)] if self.of_lowered else [])
        yield from _bars("tokens of samples", self.lengths)
        packing = self.packing
        if packing is None:
            yield Text("no pack can be filled: all rows were rejected", style="bold red")
        else:
            yield Text(
                f"expected fill {packing.fill:.1%} (from {packing.packs} packs); a pack has {packing.samples:.1f} "
                f"samples and {packing.predicted:,.0f} predicted tokens; a step has {self.packs_per_step} pack"
                f"{'s' * (self.packs_per_step > 1)}, {packing.samples_per_step:,.1f} samples and "
                f"{packing.tokens_per_step:,.0f} tokens"
            )
        yield from _bars(f"tokens of packs, at most {self.pack_tokens:,}", self.fills)
        yield from (Text(f"note: {line}") for line in self.unread)
        yield tables["rejected"] if self.rejected else Text("no row was rejected")

    def chapters(self) -> Markup:
        """Return the chapters of a page."""
        return rendered(
            "stats.html",
            stats=self,
            unread=self.unread,
            tables=self.tables(),
            shares=self._shares,
            draw_histogram=draw_histogram,
            sums=_sums,
        )

    def _shares(self, title: str) -> Markup:
        """Bars of the kinds of tokens of each source."""
        bars, lanes = [], self.sources[:_LANES]
        for lane, source in enumerate(lanes):
            start = 0.0
            for index, kind in enumerate(self.kinds):
                share = 100 * source.tokens.get(kind, 0)
                bars.append(Bar(lane, start, share, index))
                start += share
        return draw_bars(bars, [source.name for source in lanes], title, "% of its tokens", 100)


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


_LANES = 40  # sources that are drawn
_BAR = 50  # characters of the longest bar of a histogram in a terminal


def _sums(histogram: Histogram) -> list[tuple[Markup, int]]:
    return [(swatch(index, name), sum(counts)) for index, (name, counts) in enumerate(histogram.counts.items())]


def _as_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(*(Column(title, overflow="fold") for title in titles))
    for row in rows:
        table.add_row(*(Text(in_words(cell)) for cell in row))
    return table


def _bars(title: str, histogram: Histogram) -> Iterator[Text]:
    """A histogram in a terminal."""
    counts = [sum(of_bin) for of_bin in zip(*histogram.counts.values(), strict=True)]
    used = [index for index, count in enumerate(counts) if count]
    yield from ([Text(title, style="bold")] if used else [])
    for index in range(used[0], used[-1] + 1) if used else ():
        low, high = histogram.edges[index], histogram.edges[index + 1] - 1
        bar = "\u2588" * -(-_BAR * counts[index] // max(counts))
        yield Text(f"{low:>9,} to {high:>9,} ").append(bar, style="blue").append(f" {counts[index]:,}")
