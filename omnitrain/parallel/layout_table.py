"""The printed table of a model's layout, one row per component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from omnitrain.page.html import Cell, heading, table
from omnitrain.page.text import as_text
from omnitrain.page.whole import part_of_notebook

_COLUMNS = (
    "component",
    "section",
    "mode",
    "mesh",
    "units",
    "parameters",
    "trainable",
    "dtypes",
    "recompute",
    "offload",
    "sequence",
)
_TITLE = "Layout (mesh: copies x shards; dtypes: parameters / compute / sums)"


@dataclass(frozen=True)
class LayoutRow:
    """One component in the table that is printed at start-up."""

    name: str  # name of the component
    section: str  # its section, and the ranks of that; empty without sections
    mode: str  # ``fsdp2``, ``hsdp`` or ``replicate``
    mesh: str  # copies x shards, then the tensor parallel and expert parallel degrees above 1
    units: int  # number of FSDP units on the ranks that have the component; in a pipeline, on this rank
    parameters: int  # number of elements of all parameters
    trainable: int  # number of elements of trained parameters
    dtypes: str  # dtypes of parameters, computation and gradient sums
    recompute: str  # the recompute mode, with saved ops or recomputed parts
    offload: str  # the tensors kept in host memory
    sequence: str  # how ranks share a sequence


class LayoutTable(tuple[LayoutRow, ...]):
    """Rows that ``print``, a notebook and rich's console show as a table; without sections, it has no such column."""

    __slots__ = ()

    def __rich__(self) -> Table:
        has_sections = any(row.section for row in self)
        columns = [name for name in _COLUMNS if name != "section" or has_sections]
        shown = Table(*columns, title=_TITLE, title_justify="left")
        for row in self:
            section = (row.section,) if has_sections else ()
            trainable = f"{row.trainable:,}" if row.trainable else "frozen"
            sizes = (str(row.units), f"{row.parameters:,}", trainable)
            others = (row.dtypes, row.recompute, row.offload, row.sequence)
            shown.add_row(row.name, *section, row.mode, row.mesh, *sizes, *others)
        return shown

    def _repr_html_(self) -> str:
        return part_of_notebook([heading(_TITLE), self.as_html(_COLUMNS)])

    def as_html(self, columns: Sequence[str]) -> str:
        """Return some columns as an HTML table; without sections, it has no such column."""
        has_sections = any(row.section for row in self)
        shown = [name for name in columns if name != "section" or has_sections]
        return table(shown, [[_cell(row, name) for name in shown] for row in self])

    def __repr__(self) -> str:
        return as_text(self.__rich__(), columns=160)


def _cell(row: LayoutRow, column: str) -> Cell:
    value: Cell = getattr(row, "name" if column == "component" else column)
    return "frozen" if column == "trainable" and not value else value
