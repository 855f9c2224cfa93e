"""The numbers of a recipe's data as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.page.html import Cell, Raw, chapter, figure, note, swatch, table, text_of
from omnitrain.page.svg import NUM_COLORS
from omnitrain.report.chapters.plots import Plots, grid
from omnitrain.report.data.numbers import DataNumbers, Histogram
from omnitrain.report.figures import Bar, draw_bars, draw_histogram

_LANES = 40  # sources that are drawn
_LENGTHS = ("min", "mean", "median", "p95", "max")


def chapters(stats: DataNumbers, plots: Plots) -> list[str]:
    """Return all chapters; ``plots`` draws the figures."""
    drawn = [_overview(stats), _lengths(stats, plots), _modalities(stats, plots), _packs(stats, plots)]
    return [*drawn, _rejected(stats), *unread_chapter(stats.unread)]


def unread_chapter(lines: Sequence[str]) -> list[str]:
    """Return the chapter about keys of data sets that nothing reads; none if there are none."""
    return [chapter("unread", "Keys that nothing reads", [note(line) for line in lines])] if lines else []


def _overview(stats: DataNumbers) -> str:
    titles = ("data set", "rows", "measured", "rejected", "share", "epochs")
    rows = [
        (one.name, "stream" if one.rows is None else one.rows, one.measured, one.rejected, one.share, one.epochs)
        for one in stats.data_sets
    ]
    words = (
        f"Epochs of a run of {stats.steps:,} steps with {stats.packs_per_step} packs of {stats.pack_tokens:,} tokens. "
        "Measured: rows that were prepared as in training. Share: of all rows that a run reads."
    )
    return chapter("overview", "Data sets", [table(titles, rows), note(words)])


def _lengths(stats: DataNumbers, plots: Plots) -> str:
    shown = _histogram("Tokens of samples", "tokens", stats.lengths, plots)
    rows: list[list[Cell]] = [[one.name, one.samples, *map(one.length.get, _LENGTHS)] for one in stats.sources]
    return chapter("lengths", "Lengths", [grid(shown), table(("source", "samples", *_LENGTHS), rows)])


def _modalities(stats: DataNumbers, plots: Plots) -> str:
    kinds = sorted({kind for source in stats.sources for kind in source.tokens})
    lanes = stats.sources[:_LANES]
    bars = []
    for lane, source in enumerate(lanes):
        start = 0.0
        for index, kind in enumerate(kinds):
            bars.append(Bar(lane, 100 * start, 100 * source.tokens.get(kind, 0), index % NUM_COLORS))
            start += source.tokens.get(kind, 0)
    title = "What the tokens of each source are"
    svg = draw_bars(bars, [source.name for source in lanes], plots.name(), title, "% of its tokens", 100)
    titles = ("source", "in the loss", *kinds, "items of a sample")
    rows: list[list[Cell]] = [
        [
            source.name,
            source.predicted,
            *(source.tokens.get(kind) for kind in kinds),
            ", ".join(f"{modality} {count:.3g}" for modality, count in source.items.items()),
        ]
        for source in stats.sources
    ]
    legend = Raw(" ".join(f"{swatch(index % NUM_COLORS)}{text_of(kind)}" for index, kind in enumerate(kinds)))
    shown = [figure(svg, title, is_wide=True), legend.text, table(titles, rows), note(stats.of_lowered)]
    return chapter("modalities", "Modalities", shown if stats.of_lowered else shown[:-1])


def _packs(stats: DataNumbers, plots: Plots) -> str:
    packing = stats.packing
    if packing is None:
        return chapter("packs", "Packs", [note("No pack can be filled: all rows were rejected.")])
    titles = ("expected fill", "samples", "predicted tokens", "samples of a step", "tokens of a step")
    row = (packing.fill, packing.samples, packing.predicted, packing.samples_per_step, packing.tokens_per_step)
    words = f"Means of {packing.packs} packs, filled with the measured rows in the order of a run."
    title = f"Tokens of packs, at most {stats.pack_tokens:,}"
    shown = _histogram(title, "tokens", stats.fills, plots)
    return chapter("packs", "Packs", [table(titles, [row]), note(words), grid(shown)])


def _rejected(stats: DataNumbers) -> str:
    if not stats.rejected:
        return chapter("rejected", "Rejected rows", [note("None of the rows that were measured.")])
    rows = [(one.source, one.rows, one.reason, f"{one.example}: {one.words}") for one in stats.rejected]
    return chapter("rejected", "Rejected rows", [table(("source", "rows", "reason", "example"), rows)])


def _histogram(title: str, x: str, histogram: Histogram, plots: Plots) -> Sequence[str]:
    if not histogram.counts:
        return []
    svg = draw_histogram(histogram.edges, histogram.counts, plots.name(), title, x)
    names = list(histogram.counts)
    legend = table(
        ("", "count"),
        [
            [Raw(swatch(index % NUM_COLORS) + text_of(name)), sum(histogram.counts[name])]
            for index, name in enumerate(names)
        ],
    )
    return [f"<div>{figure(svg, title)}{legend if len(names) > 1 else ''}</div>"]
