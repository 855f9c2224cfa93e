"""The numbers of ``omnitrain data stats``, in a terminal, in a notebook, on a page and in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from omnitrain.report.data.numbers import LENGTHS, DataNumbers, Histogram, SourceStats
from omnitrain.report.data.shown import Shown
from omnitrain.report.html import Share, in_words, rendered, swatch
from omnitrain.report.svg import Bar, draw_bars, draw_histogram

_LANES = 40  # sources that are drawn
_BAR = 50  # characters of the longest bar of a histogram in a terminal


@dataclass(frozen=True, repr=False)
class DataStats(DataNumbers, Shown):
    """The numbers of a recipe's data. A notebook shows them as HTML, a terminal as text."""

    title: ClassVar[str] = "statistics of the data"

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
        """Of each source, bars of what its tokens are."""
        bars, lanes = [], self.sources[:_LANES]
        for lane, source in enumerate(lanes):
            start = 0.0
            for index, kind in enumerate(self.kinds):
                share = 100 * source.tokens.get(kind, 0)
                bars.append(Bar(lane, start, share, index))
                start += share
        return draw_bars(bars, [source.name for source in lanes], title, "% of its tokens", 100)


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
