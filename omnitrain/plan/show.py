"""A step plan for people: one line per component and micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ComponentLine:
    """What a component does in a micro-batch.

    Attributes:
        micro_batch: which.
        component: its name.
        calls: of each of its ranks.
        items: it encodes.
        travelling: of them, those that some other rank than their producer needs.
        minimal_ranks: ranks that make at least one call with the minimal input.
        imbalance: cost of the busiest rank over the mean; 1 where nothing costs anything.
        reduces: it is the component's last active micro-batch.
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
    """The lines of a table with a row for each of ``lines``, under its titles."""
    titles = ("micro-batch", "component", "calls", "items", "travel", "minimal on", "max/mean cost", "reduces")
    rows = [
        (
            str(line.micro_batch),
            line.component,
            str(line.calls),
            str(line.items),
            str(line.travelling),
            f"{line.minimal_ranks} ranks",
            f"{line.imbalance:.2f}",
            "yes" if line.reduces else "",
        )
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows))
    return [line.rstrip() for line in table]
