"""Figures of curves, each with a table that is its legend and has its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from omnitrain.page.html import Cell, Raw, figure, note, swatch, table, text_of
from omnitrain.report.curves import Curve
from omnitrain.report.figures import MAX_CURVES, draw_curves, styles


class Plots:
    """Draws the figures of a page.

    Args:
        labels: names of the runs.
        prefix: start of the names of its figures.
    """

    def __init__(self, labels: Sequence[str], prefix: str = "f") -> None:
        self.labels, self._prefix = labels, prefix
        self._numbers = count()

    def name(self) -> str:
        """Return a name that no other figure of the page has."""
        return f"{self._prefix}{next(self._numbers)}"

    def curves(self, title: str, curves: Sequence[Curve]) -> str:
        """Return a figure and its table; nothing without curves."""
        if not curves:
            return ""
        drawn = curves[:MAX_CURVES]
        svg = draw_curves(drawn, self.name(), title)
        left = len(curves) - len(drawn)
        more = note(f"{left} more curves are not drawn; the table has their numbers") if left else ""
        return f"<div>{figure(svg, title)}{more}{self._table(curves)}</div>"

    def _table(self, curves: Sequence[Curve]) -> str:
        """First, last, lowest and highest value of each curve."""
        rows: list[list[Cell]] = []
        for curve, style in zip(curves, styles(curves), strict=True):
            name = Raw(swatch(style.color, style.dash) + text_of(self._name_of(curve, curves)))
            values = curve.values
            rows.append([name, values[0], values[-1], min(values), max(values)])
        return table(["", "first", "last", "lowest", "highest"], rows)

    def _name_of(self, curve: Curve, curves: Sequence[Curve]) -> str:
        """What tells it from the others: its name, its run, or both."""
        if len(self.labels) == 1:
            return curve.name
        label = self.labels[curve.run]
        return label if len({one.name for one in curves}) == 1 else f"{curve.name}, {label}"


def grid(parts: Sequence[str]) -> str:
    """Return figures side by side, as many as fit."""
    shown = "".join(parts)
    return f'<div class="figures">{shown}</div>' if shown else ""
