"""A small curve as SVG, cheap enough to be drawn anew several times per second."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BELOW, _FONT = 420, 120, 52, 18, 11  # units of the picture
_COLOR = "#2a7fc9"  # seen on light and on dark
_MOST = 200  # points


class SmallCurve:
    """A curve that grows. Of many points it keeps, in each stretch, the lowest and the highest.

    Args:
        title: what it shows, for readers who cannot see it.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._points: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Add a point at its right end."""
        self._points.append((x, y))
        if len(self._points) >= 2 * _MOST:
            self._points = _ends_of_stretches(self._points, 4)

    def svg(self, last_x: float) -> str:
        """Return the curve with its lowest, highest and last value; ``last_x``: right end of the axis."""
        points = [point for point in self._points if abs(point[1]) < float("inf")]
        if len(points) < 2:
            return ""
        low, high = min(y for _, y in points), max(y for _, y in points)
        wide, tall = max(last_x - points[0][0], 1), max(high - low, 1e-12)
        places = [
            (_LEFT + (_WIDTH - _LEFT - 4) * (x - points[0][0]) / wide, 4 + (_HEIGHT - _BELOW - 8) * (high - y) / tall)
            for x, y in points
        ]
        line = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        ends = ((4 + _FONT, high), (_HEIGHT - _BELOW - 4, low))
        words = [_text(_LEFT - 6, top, f"{value:.3g}", "end") for top, value in ends]
        words += [
            _text(_LEFT, _HEIGHT - 4, f"{points[0][0]:g}", "start"),
            _text(_WIDTH - 4, _HEIGHT - 4, f"{last_x:g}", "end"),
        ]
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(self._title)}">'
            f'<path d="M{_LEFT},0V{_HEIGHT - _BELOW}H{_WIDTH}" fill="none" stroke="currentColor" opacity=".3"/>'
            f'<polyline points="{line}" fill="none" stroke="{_COLOR}" stroke-width="1.5"/>{"".join(words)}</svg>'
        )


def _ends_of_stretches(points: Sequence[tuple[float, float]], length: int) -> list[tuple[float, float]]:
    """The lowest and the highest point of each ``length`` points."""
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), length):
        part = points[start : start + length]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _text(left: float, top: float, words: str, anchor: str) -> str:
    style = f'font-size="{_FONT}" fill="currentColor" text-anchor="{anchor}"'
    return f'<text x="{left}" y="{top}" {style}>{escape(words)}</text>'
