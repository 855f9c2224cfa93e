"""Figures of curves, each with a table that is its legend and has its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from omnitrain.report.curves import Curve
from omnitrain.report.figures import MAX_CURVES, draw_curves, styles
from omnitrain.report.html import Cell, Raw, figure, note, swatch, table, text_of


class Plots:
    """Draws the figures of a page.

    Args:
        labels: names of the runs.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = labels
        self._numbers = count()

    def name(self) -> str:
        """Return a name that no other figure of the page has."""
        return f"f{next(self._numbers)}"

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
        has_runs = len(self.labels) > 1
        titles = ["", *["run"] * has_runs, "first", "last", "lowest", "highest"]
        looks = styles(curves)
        rows: list[list[Cell]] = []
        for curve, style in zip(curves, looks, strict=True):
            named = Raw(swatch(style.color, style.dash) + text_of(curve.name))
            values = curve.values
            rows.append(
                [
                    named,
                    *[self.labels[curve.run]] * has_runs,
                    values[0],
                    values[-1],
                    min(values),
                    max(values),
                ]
            )
        return table(titles, rows)


def grid(parts: Sequence[str]) -> str:
    """Return figures side by side, as many as fit."""
    shown = "".join(parts)
    return f'<div class="figures">{shown}</div>' if shown else ""
