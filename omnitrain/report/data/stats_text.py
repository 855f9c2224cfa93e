"""The numbers of a recipe's data in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from omnitrain.report.data.numbers import LENGTHS, DataNumbers, Histogram

_BAR = 50  # characters of the longest bar of a histogram


def stats_lines(stats: DataNumbers) -> Iterator[RenderableType]:
    """Yield tables and histograms."""
    yield _data_sets(stats)
    yield _lengths(stats)
    yield _shares(stats)
    if stats.of_lowered:
        yield Text(stats.of_lowered)
    yield from _histogram("tokens of samples", stats.lengths)
    yield _packing(stats)
    yield from _histogram(f"tokens of packs, at most {stats.pack_tokens:,}", stats.fills)
    yield from (Text(f"note: {line}") for line in stats.unread)
    if not stats.rejected:
        yield Text("no row was rejected")
        return
    table = Table("source", "rows", "reason", "example", title="rejected rows", title_justify="left")
    for one in stats.rejected:
        table.add_row(one.source, f"{one.rows:,}", Text(one.reason), Text(f"{one.example}: {one.words}"))
    yield table


def _data_sets(stats: DataNumbers) -> Table:
    table = Table("data set", "rows", "measured", "rejected", "share", f"epochs in {stats.steps:,} steps")
    for one in stats.data_sets:
        epochs = "none" if one.epochs is None else f"{one.epochs:.3g}"
        counts = ["stream" if n is None else f"{n:,}" for n in (one.rows, one.measured, one.rejected)]
        table.add_row(one.name, *counts, f"{one.share:.1%}", epochs)
    return table


def _lengths(stats: DataNumbers) -> Table:
    table = Table("tokens of samples", "samples", "rejected", *LENGTHS)
    for one in stats.sources:
        lengths = [f"{one.length[name]:,.0f}" for name in LENGTHS]
        table.add_row(one.name, f"{one.samples:,}", f"{one.rejected:,}", *lengths)
    return table


def _shares(stats: DataNumbers) -> Table:
    table = Table("share of tokens", *stats.kinds, "in the loss")
    for one in stats.sources:
        shares = [f"{one.tokens[kind]:.0%}" if kind in one.tokens else "" for kind in stats.kinds]
        table.add_row(one.name, *shares, f"{one.predicted:.0%}")
    return table


def _packing(stats: DataNumbers) -> Text:
    packing = stats.packing
    if packing is None:
        return Text("no pack can be filled: all rows were rejected", style="bold red")
    return Text(
        f"expected fill {packing.fill:.1%} (from {packing.packs} packs); a pack has {packing.samples:.1f} samples and "
        f"{packing.predicted:,.0f} predicted tokens; a step has {stats.packs_per_step} pack"
        f"{'s' * (stats.packs_per_step > 1)}, {packing.samples_per_step:,.1f} samples and "
        f"{packing.tokens_per_step:,.0f} tokens"
    )


def _histogram(title: str, histogram: Histogram) -> Iterator[Text]:
    counts = [sum(of_bin) for of_bin in zip(*histogram.counts.values(), strict=True)]
    if not counts:
        return
    yield Text(title, style="bold")
    used = [index for index, count in enumerate(counts) if count]
    for index in range(used[0], used[-1] + 1):
        low, high = histogram.edges[index], histogram.edges[index + 1] - 1
        bar = "\u2588" * -(-_BAR * counts[index] // max(counts))
        yield Text(f"{low:>9,} to {high:>9,} ").append(bar, style="blue").append(f" {counts[index]:,}")
