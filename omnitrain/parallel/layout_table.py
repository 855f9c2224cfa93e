"""The printed table of a model's layout, one row per component."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rich.table import Table

from omnitrain.terminal import as_text

LAYOUT_TITLE = "Layout (mesh: copies x shards; dtypes: parameters / compute / sums)"


@dataclass(frozen=True)
class LayoutRow:
    """One component in the table that is printed at start-up."""

    name: str
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


LAYOUT_COLUMNS = ("component", *(field.name for field in fields(LayoutRow)[1:]))


class LayoutTable(tuple[LayoutRow, ...]):
    """Rows that ``print`` and rich's console show as a table; without sections, it has no such column."""

    __slots__ = ()

    def __rich__(self) -> Table:
        has_sections = any(row.section for row in self)
        columns = [name for name in LAYOUT_COLUMNS if name != "section" or has_sections]
        shown = Table(*columns, title=LAYOUT_TITLE, title_justify="left")
        for row in self:
            values = {**vars(row), "trainable": row.trainable or "frozen"}
            cells = (value for name, value in values.items() if has_sections or name != "section")
            shown.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in cells))
        return shown

    def __repr__(self) -> str:
        return as_text(self.__rich__(), columns=160)
