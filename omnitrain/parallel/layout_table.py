"""The printed table of a model's layout, one row per component."""

from __future__ import annotations

<<<<<<< HEAD
from collections.abc import Sequence
from dataclasses import dataclass, fields
=======
from dataclasses import dataclass
>>>>>>> main

from rich.table import Table

from omnitrain.terminal import as_text

<<<<<<< HEAD
_TITLE = "Layout (mesh: copies x shards; dtypes: parameters / compute / sums)"
=======
LAYOUT_COLUMNS = (
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
LAYOUT_TITLE = "Layout (mesh: copies x shards; dtypes: parameters / compute / sums)"
>>>>>>> main


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
    """Rows that ``print`` and rich's console show as a table; without sections, it has no such column."""

    __slots__ = ()

    def __rich__(self) -> Table:
<<<<<<< HEAD
        columns = self._columns(_COLUMNS)
        shown = Table(*columns, title=_TITLE, title_justify="left")
=======
        has_sections = any(row.section for row in self)
        columns = [name for name in LAYOUT_COLUMNS if name != "section" or has_sections]
        shown = Table(*columns, title=LAYOUT_TITLE, title_justify="left")
>>>>>>> main
        for row in self:
            cells = (_cell(row, name) for name in columns)
            shown.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells))
        return shown

<<<<<<< HEAD
    def _repr_html_(self) -> str:
        return part_of_notebook([heading(_TITLE), self.as_html(_COLUMNS)])

    def as_html(self, columns: Sequence[str]) -> str:
        """Return some columns as an HTML table; without sections, it has no such column."""
        shown = self._columns(columns)
        return table(shown, [[_cell(row, name) for name in shown] for row in self])

    def _columns(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name != "section" or any(row.section for row in self)]

=======
>>>>>>> main
    def __repr__(self) -> str:
        return as_text(self.__rich__(), columns=160)
