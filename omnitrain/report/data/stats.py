"""The numbers of ``omnitrain data stats``, in a terminal, in a notebook, on a page and in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup
from rich.console import RenderableType

from omnitrain.report.data.numbers import LENGTHS, DataNumbers, Histogram
from omnitrain.report.data.shown import Shown
from omnitrain.report.data.stats_text import stats_lines
from omnitrain.report.html import rendered, swatch
from omnitrain.report.svg import Bar, draw_bars, draw_histogram

_LANES = 40  # sources that are drawn


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

    def lines(self) -> Iterator[RenderableType]:
        """Return what a terminal shows."""
        return stats_lines(self)

    def chapters(self) -> Markup:
        """Return the chapters of a page."""
        return rendered(
            "stats.html",
            stats=self,
            unread=self.unread,
            data_sets=[
                (one.name, one.num_rows, one.measured, one.rejected, one.share, one.epochs) for one in self.data_sets
            ],
            lengths=LENGTHS,
            of_lengths=[[one.name, one.samples, *map(one.length.get, LENGTHS)] for one in self.sources],
            kinds=self.kinds,
            of_kinds=[
                [
                    *(one.name, one.predicted, *map(one.tokens.get, self.kinds)),
                    ", ".join(f"{modality} {count:.3g}" for modality, count in one.items.items()),
                ]
                for one in self.sources
            ],
            rejected=[(one.source, one.rows, one.reason, f"{one.example}: {one.words}") for one in self.rejected],
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
