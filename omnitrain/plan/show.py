"""Show a step plan as text: one line per component and micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_TITLES = ("micro-batch", "component", "calls", "items", "travel", "minimal on", "max/mean cost", "reduces")


class ComponentLine(NamedTuple):
    """The work of a component in a micro-batch.

    Attributes:
        micro_batch: index of the micro-batch.
        component: name of the component.
        calls: calls on each of its ranks.
        items: number of items it encodes.
        travelling: number of these items that a rank other than their producer needs.
        minimal_ranks: number of ranks that make at least one call with the minimal input.
        imbalance: cost on the busiest rank divided by the mean; 1 if all costs are 0.
        reduces: whether this is the component's last active micro-batch.
    """

    micro_batch: int
    component: str
    calls: int
    items: int
    travelling: int
    minimal_ranks: int
    imbalance: float
    reduces: bool


def component_table(lines: Iterable[ComponentLine]) -> list[str]:
    """Return the text lines of a table: its titles, then one line for each of ``lines``."""
    rows = [
        (*map(str, line[:5]), f"{line.minimal_ranks} ranks", f"{line.imbalance:.2f}", "yes" if line.reduces else "")
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (_TITLES, *rows))
    return [line.rstrip() for line in table]
