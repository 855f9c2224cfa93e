"""The printed table of a model's layout, one row per component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich.table import Table

from omnitrain.page.html import Cell, heading, table
from omnitrain.page.text import as_text
from omnitrain.page.whole import part_of_notebook

_TITLE = "Layout (mesh: copies x shards; dtypes: parameters / compute / sums)"


@dataclass(frozen=True)
class LayoutRow:
    """One component in the table that is printed at start-up.

    Attributes:
        name: name of the component.
        section: its section, and the ranks of that; empty without sections.
        mode: ``fsdp2``, ``hsdp`` or ``replicate``.
        mesh: copies x shards, then the tensor parallel and expert parallel degrees above 1.
        units: number of FSDP units on the ranks that have the component; in a pipeline, on this rank.
        parameters: number of elements of all parameters.
        trainable: number of elements of trained parameters.
        dtypes: dtypes of parameters, computation and gradient sums.
        recompute: the recompute mode, with saved ops or recomputed parts.
        offload: the tensors kept in host memory.
        sequence: how ranks share a sequence.
    """

    name: str
    section: str
    mode: str
    mesh: str
    units: int
    parameters: int
    trainable: int
    dtypes: str
    recompute: str
    offload: str
    sequence: str


_COLUMNS = ("component", *(field.name for field in fields(LayoutRow)[1:]))


class LayoutTable(tuple[LayoutRow, ...]):
    """Rows that ``print``, a notebook and rich's console show as a table; without sections, it has no such column."""

    __slots__ = ()

    def __rich__(self) -> Table:
        columns = self._columns(_COLUMNS)
        shown = Table(*columns, title=_TITLE, title_justify="left")
        for row in self:
            cells = (_cell(row, name) for name in columns)
            shown.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells))
        return shown

    def _repr_html_(self) -> str:
        return part_of_notebook([heading(_TITLE), self.as_html(_COLUMNS)])

    def as_html(self, columns: Sequence[str]) -> str:
        """Return some columns as an HTML table; without sections, it has no such column."""
        shown = self._columns(columns)
        return table(shown, [[_cell(row, name) for name in shown] for row in self])

    def _columns(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name != "section" or any(row.section for row in self)]

    def __repr__(self) -> str:
        return as_text(self.__rich__(), columns=160)


def _cell(row: LayoutRow, column: str) -> Cell:
    value: Cell = getattr(row, "name" if column == "component" else column)
    return "frozen" if column == "trainable" and not value else value
