"""Draw the figures of a report as SVG: lines over steps, bars, histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from omnitrain.page.svg import BACK, GRID, NUM_COLORS, TEXT, color, svg_of
from omnitrain.report.curves import Curve, is_wide, thinned

MAX_CURVES = 24  # more in one figure cannot be told apart
_MAX_POINTS, _MAX_POINTS_OF_FIGURE = 400, 4000
_DASHES: Sequence[Any] = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
_MARKED = 30  # curves with fewer points have a mark on each
_SIZE = (4.4, 2.3)  # inches; 72 units of the SVG each
_FONT = 8


@dataclass(frozen=True)
class Style:
    """How a curve is drawn.

    Attributes:
        color: index of its colour.
        dash: index of its dashes.
    """

    color: int
    dash: int


def styles(curves: Sequence[Curve]) -> list[Style]:
    """Return a style for each curve: names differ in colour, and runs in dashes; of one name, runs differ in colour."""
    names = list(dict.fromkeys(curve.name for curve in curves))
    if len(names) == 1:
        return [Style(curve.run % NUM_COLORS, curve.run // NUM_COLORS) for curve in curves]
    places = {name: index for index, name in enumerate(names)}
    return [
        Style(places[curve.name] % NUM_COLORS, (curve.run + places[curve.name] // NUM_COLORS) % len(_DASHES))
        for curve in curves
    ]


def draw_curves(curves: Sequence[Curve], name: str, title: str, x: str = "step") -> str:
    """Return curves over steps, or over another whole number, as SVG.

    Args:
        curves: at least one and at most :data:`MAX_CURVES`.
        name: start of the ids in the figure.
        title: what it shows.
        x: label of the horizontal axis.
    """
    figure, axes = _figure(*_SIZE)
    most = min(_MAX_POINTS, _MAX_POINTS_OF_FIGURE // len(curves))
    for curve, style in zip(curves, styles(curves), strict=True):
        points = thinned(curve.points, most)
        values = [float("nan") if value is None else value for _, value in points]
        axes.plot(
            [step for step, _ in points],
            values,
            color=color(style.color),
            linestyle=_DASHES[style.dash % len(_DASHES)],
            linewidth=1.2,
            marker="o",
            markersize=2.5,
            markevery=_marks(values),
        )
    steps = [step for curve in curves for step, _ in curve.points]
    if min(steps) == max(steps):
        axes.set_xlim(min(steps) - 1, min(steps) + 1)  # otherwise steps would have decimals
    if is_wide(curves):
        axes.set_yscale("log")
    axes.set_xlabel(x, color=TEXT, fontsize=_FONT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(True, color=GRID, linewidth=0.6)
    return svg_of(figure, name, escape(title))


def _marks(values: Sequence[float]) -> list[int]:
    """Return the points that need a mark to be seen: all of a short curve, else those between two gaps."""
    if len(values) <= _MARKED:
        return list(range(len(values)))
    known = [False, *(value == value for value in values), False]
    return [index for index in range(len(values)) if known[index + 1] and not (known[index] or known[index + 2])]


@dataclass(frozen=True)
class Bar:
    """A stretch of time, or of something else, in a lane.

    Attributes:
        lane: index of the lane, from the top.
        start: its left end.
        length: its length.
        color: index of its colour.
    """

    lane: int
    start: float
    length: float
    color: int


def draw_bars(
    bars: Sequence[Bar], lanes: Sequence[str], name: str, title: str, x: str, end: float | None = None
) -> str:
    """Return bars as SVG, with a lane for each of ``lanes``.

    Args:
        bars: the bars.
        lanes: names of the lanes, from the top.
        name: start of the ids in the figure.
        title: what it shows.
        x: label of the horizontal axis, with its unit.
        end: right end of the axis, if it is not that of the last bar.
    """
    figure, axes = _figure(9.0, 0.7 + 0.24 * len(lanes))
    by_color: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in bars:
        by_color.setdefault((bar.lane, bar.color), []).append((bar.start, bar.length))
    for (lane, index), spans in sorted(by_color.items()):
        axes.broken_barh(spans, (lane - 0.4, 0.8), facecolors=color(index), linewidth=0)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), lanes)
    if end is not None:
        axes.set_xlim(0, end)
    axes.set_xlabel(x, color=TEXT, fontsize=_FONT)
    axes.grid(True, axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return svg_of(figure, name, escape(title))


def draw_histogram(edges: Sequence[float], counts: Mapping[str, Sequence[int]], name: str, title: str, x: str) -> str:
    """Return stacked bars as SVG.

    Args:
        edges: ends of the bins, one more than bins.
        counts: name -> number of values in each bin; the names have the colours 0, 1, ...
        name: start of the ids in the figure.
        title: what it shows.
        x: label of the horizontal axis.
    """
    figure, axes = _figure(*_SIZE)
    below = [0] * (len(edges) - 1)
    for index, of_name in enumerate(counts.values()):
        widths = [right - left for left, right in pairwise(edges)]
        axes.bar(edges[:-1], of_name, widths, bottom=below, align="edge", color=color(index), edgecolor=BACK)
        below = [low + count for low, count in zip(below, of_name, strict=True)]
    axes.set_xlabel(x, color=TEXT, fontsize=_FONT)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(True, axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return svg_of(figure, name, escape(title))


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.tick_params(colors=TEXT, labelsize=_FONT, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    return figure, axes
