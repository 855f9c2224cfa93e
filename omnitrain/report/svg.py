"""Pictures as SVG: curves over steps, bars, histograms. They take the colours of the page around them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from omnitrain.report.html import NUM_COLORS, tag

Line = Mapping[str, Any]  # of metrics
Points = list[tuple[int, float | None]]  # step, value; None is a gap


@dataclass(frozen=True)
class Curve:
    """A number of a run (its index) over its steps, of the same name in all runs; it has at least one value."""

    run: int
    name: str
    points: Points

    @property
    def values(self) -> list[float]:
        """All values, without the gaps."""
        return [value for _, value in self.points if value is not None]


def styles(curves: Sequence[Curve]) -> list[tuple[int, int]]:
    """Return colour and dashes of each curve: names differ in colour, runs in dashes (of one name, in colour)."""
    places = {name: index for index, name in enumerate(dict.fromkeys(curve.name for curve in curves))}
    if len(places) == 1:
        return [(curve.run % 10, curve.run // 10) for curve in curves]
    return [(places[curve.name] % 10, curve.run + places[curve.name] // 10) for curve in curves]


def numbers_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line of metrics with their paths, such as ``heads/text/loss``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


class Metrics:
    """The numbers of all lines of metrics of several runs, by path. Each can be taken once."""

    def __init__(self, lines: Sequence[Sequence[Line]]) -> None:
        self._rows = [[(line["step"], dict(numbers_in(line))) for line in of_run] for of_run in lines]
        self._left = dict.fromkeys(path for rows in self._rows for _, row in rows for path in row if path != "step")

    def take(self, *patterns: str) -> dict[str, list[Curve]]:
        """Return figure -> curves of the paths that match one of these expressions and were not taken yet.

        A group ``figure`` of the expression divides the paths into figures; without it, there is one, ``""``. A group
        ``name`` names the curve; without it, or where it is empty, its path does. Runs without a path have no curve.
        """
        figures: dict[str, list[Curve]] = {}
        for pattern in patterns:
            for path in [*self._left]:
                if (found := re.fullmatch(pattern, path)) is None:
                    continue
                del self._left[path]
                groups = found.groupdict()
                curves = [
                    Curve(run, groups.get("name") or path, [(step, row.get(path)) for step, row in rows])
                    for run, rows in enumerate(self._rows)
                ]
                figures.setdefault(groups.get("figure") or "", []).extend(c for c in curves if c.values)
        return {name: curves for name, curves in figures.items() if curves}


def thinned(points: Points, most: int) -> Points:
    """Return at most ``most`` of the points: of each stretch of steps the lowest and the highest one.

    A peak of a single step stays, unlike with a mean or with every n-th point. Gaps stay where a stretch has no value.
    """
    if len(points) <= most:
        return points
    buckets = max(most // 2, 1)
    kept: Points = []
    for bucket in range(buckets):
        part = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        known = [(value, step) for step, value in part if value is not None]
        if not known:
            kept.append((part[0][0], None))
            continue
        ends = {min(known)[1]: min(known)[0], max(known)[1]: max(known)[0]}
        kept += sorted(ends.items())
    return kept


BACK, LINE = "var(--back,#fff)", "var(--line,#8886)"
_DASHES = ("none", "5 3", "1 3", "7 3 1 3")
_MOST_POINTS, _MOST_OF_FIGURE = 400, 4000
_WIDTH, _HEIGHT, _LEFT, _BELOW = 320, 170, 46, 30  # units of the small pictures; the two last ones for numbers
_FONT = 9
_MARKED = 30  # curves with fewer points have a dot on each
_LANE = 17  # height


def color(index: int) -> str:
    """Return the ``index``-th colour of the page, or a blue one where no page has set it; they repeat."""
    return f"var(--c{index % NUM_COLORS},#2a7fc9)"


def picture(width: float, height: float, title: str, parts: Iterable[Markup]) -> Markup:
    """Return an ``<svg>`` element; ``title`` is for readers who cannot see it."""
    box = f"0 0 {width:.0f} {height:.0f}"
    content = Markup("").join(parts)
    looks = {"font_size": _FONT, "fill": "currentColor", "role": "img", "aria_label": title}
    return tag("svg", content, viewBox=box, width=f"{width:.0f}", **looks)


def words_at(x: float, y: float, words: str, anchor: str = "start", **looks: str) -> Markup:
    """Return a text; ``y``: where letters stand."""
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **looks)


@dataclass(frozen=True)
class _Axis:
    """Values from ``low`` to ``high``, drawn from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(one) if self.is_log else one for one in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high > low else 0.5)

    def ticks(self, most: int, least: float = 0.0) -> list[float]:
        """Return at most about ``most`` round values, at least ``least`` apart; powers of 10 on a logarithmic axis."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers[:: -(-len(powers) // most)]]
        rough = max((self.high - self.low) / most, least)
        if not rough:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        return [apart * i for i in range(math.ceil(self.low / apart), math.floor(self.high / apart) + 1)]


def _short(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e5 else f"{value:,.0f}"


def _across(axis: _Axis, bottom: float, label: str, is_grid: bool = True) -> Iterator[Markup]:
    """The horizontal axis with its numbers and its label."""
    for value in axis.ticks(6, 1.0 if axis.high - axis.low >= 1 else 0.0):
        if is_grid:
            yield tag("path", d=f"M{axis.at(value):.1f},4V{bottom:.1f}", stroke=LINE, stroke_width=0.6)
        yield words_at(axis.at(value), bottom + 11, _short(value), "middle")
    yield words_at((axis.start + axis.end) / 2, bottom + 24, label, "middle")


def _up(axis: _Axis, end: float, least: float = 0.0) -> Iterator[Markup]:
    """The vertical axis."""
    for value in axis.ticks(5, least):
        yield tag("path", d=f"M{_LEFT},{axis.at(value):.1f}H{end}", stroke=LINE, stroke_width=0.6)
        yield words_at(_LEFT - 5, axis.at(value) + 3, _short(value), "end")


def draw_curves(curves: Sequence[Curve], title: str, x: str = "step", end: int | None = None) -> Markup:
    """Return curves over steps, or over another whole number, which ``x`` names, up to ``end`` or the last one.

    Where values spread over more than two powers of 10, the axis is logarithmic.
    """
    values = [value for curve in curves for value in curve.values]
    steps = [step for curve in curves for step, _ in curve.points]
    low, high = min(values), max(values)
    is_log = low > 0 and math.log10(high) - math.log10(low) > 2
    room = 0.0 if is_log else 0.05 * (high - low or abs(high) or 1)
    across, up = _axes(min(steps), end or max(steps), low - room, high + room, is_log)
    parts = [*_across(across, up.start, x), *_up(up, _WIDTH - 8)]
    most = min(_MOST_POINTS, _MOST_OF_FIGURE // len(curves))
    for curve, (of_curve, dash) in zip(curves, styles(curves), strict=True):
        looks = {"stroke": color(of_curve), "stroke_dasharray": _DASHES[dash % len(_DASHES)]}
        line, dots = _line(thinned(curve.points, most), across, up)
        parts.append(tag("path", d=line, fill="none", stroke_width=1.5, **looks))
        parts.append(tag("path", d=dots, stroke=looks["stroke"], stroke_width=4, stroke_linecap="round"))
    return picture(_WIDTH, _HEIGHT, title, parts)


def _axes(first: float, last: float, low: float, high: float, is_log: bool = False) -> tuple[_Axis, _Axis]:
    return _Axis(first, last, _LEFT, _WIDTH - 8), _Axis(low, high, _HEIGHT - _BELOW, 8, is_log)


def _line(points: Sequence[tuple[int, float | None]], across: _Axis, up: _Axis) -> tuple[str, str]:
    """A line that begins anew after each gap, and dots: on all points of a short curve, else on those between gaps."""
    places = [None if value is None else f"{across.at(step):.1f},{up.at(value):.1f}" for step, value in points]
    line = "".join(
        f"{'L' if before else 'M'}{place}" for before, place in zip([None, *places], places, strict=False) if place
    )
    neighbours = zip([None, *places], places, [*places[1:], None], strict=False)
    is_short = len(points) <= _MARKED
    return line, "".join(f"M{place}h0" for a, place, b in neighbours if place and (is_short or not (a or b)))


@dataclass(frozen=True)
class Bar:
    """A stretch of time, or of something else, in the ``lane``-th lane from the top, with the index of its colour."""

    lane: int
    start: float
    length: float
    color: int


def draw_bars(bars: Sequence[Bar], lanes: Sequence[str], title: str, x: str, end: float | None = None) -> Markup:
    """Return bars in named lanes, from the top, over ``x`` from 0 to ``end``, or else to the end of the last bar."""
    left, width, bottom = 12 + 5.2 * max(map(len, lanes)), 650, 4 + _LANE * len(lanes)
    last = max((bar.start + bar.length for bar in bars), default=1) if end is None else end
    across = _Axis(0, last, left, width - 12)
    parts = [*_across(across, bottom, x)]
    parts += [words_at(left - 6, 4 + _LANE * (i + 0.7), name, "end") for i, name in enumerate(lanes)]
    drawn: dict[int, list[str]] = {}
    for bar in bars:
        start, stop = across.at(bar.start), across.at(bar.start + bar.length)
        box = f"M{start:.1f},{6 + _LANE * bar.lane}H{stop:.1f}v{_LANE - 4}H{start:.1f}z"
        drawn.setdefault(bar.color, []).append(box)
    parts += [tag("path", d="".join(boxes), fill=color(index)) for index, boxes in sorted(drawn.items())]
    return picture(width, bottom + _BELOW, title, parts)


def draw_histogram(edges: Sequence[float], counts: Mapping[str, Sequence[int]], title: str, x: str) -> Markup:
    """Return stacked bars: name -> number of values in each bin between ``edges``, in the colours 0, 1, ..."""
    across, up = _axes(edges[0], edges[-1], 0, max(map(sum, zip(*counts.values(), strict=True))) or 1)
    parts = [*_across(across, up.start, x, is_grid=False), *_up(up, _WIDTH - 8, least=1)]
    below = [0] * (len(edges) - 1)
    for index, of_name in enumerate(counts.values()):
        boxes = [
            f"M{across.at(edges[i]):.1f},{up.at(low):.1f}H{across.at(edges[i + 1]):.1f}V{up.at(low + count):.1f}"
            f"H{across.at(edges[i]):.1f}z"
            for i, (low, count) in enumerate(zip(below, of_name, strict=True))
            if count
        ]
        parts.append(tag("path", d="".join(boxes), fill=color(index), stroke=BACK))
        below = [low + count for low, count in zip(below, of_name, strict=True)]
    return picture(_WIDTH, _HEIGHT, title, parts)
