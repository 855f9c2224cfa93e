"""The printed table of a model's layout, one row per component."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_COLUMNS = (
    "component",
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
    """One component in the table that is printed at start-up.

    Attributes:
        name: name of the component.
        mode: ``fsdp2``, ``hsdp`` or ``replicate``.
        mesh: copies x shards, then the tensor parallel and expert parallel degrees above 1.
        units: number of FSDP units.
        parameters: number of elements of all parameters.
        trainable: number of elements of trained parameters.
        dtypes: dtypes of parameters, computation and gradient sums.
        recompute: the recompute mode, with saved ops or recomputed parts.
        offload: the tensors kept in host memory.
        sequence: how ranks share a sequence.
    """

    name: str
    mode: str
    mesh: str
    units: int
    parameters: int
    trainable: int
    dtypes: str
    recompute: str
    offload: str
    sequence: str


class LayoutTable(tuple[LayoutRow, ...]):
    """Rows that ``print``, a notebook and rich's console show as a table."""

    __slots__ = ()

    def __rich__(self) -> Table:
        table = Table(*_COLUMNS, title=_TITLE, title_justify="left")
        for row in self:
            trainable = f"{row.trainable:,}" if row.trainable else "frozen"
            sizes = (str(row.units), f"{row.parameters:,}", trainable)
            table.add_row(row.name, row.mode, row.mesh, *sizes, row.dtypes, row.recompute, row.offload, row.sequence)
        return table

    def __repr__(self) -> str:
        console = Console(width=160)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get()
