"""What was applied to each component of a model, to be printed."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_HEADS = (
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
    """A component in the table that start-up prints.

    Attributes:
        name: of the component.
        mode: ``fsdp2``, ``hsdp`` or ``replicate``.
        mesh: copies x ranks of each, those that share its matrices, and those that share its experts, where there are
            some.
        units: number of modules that gather and reduce together.
        parameters: elements, of which ``trainable`` train.
        trainable: elements.
        dtypes: of parameters, computation and gradient sums.
        recompute: what is computed again.
        offload: what lives in host memory.
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
    """Rows, which ``print``, a notebook and rich's console show as a table."""

    __slots__ = ()

    def __rich__(self) -> Table:
        table = Table(*_HEADS, title=_TITLE, title_justify="left")
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
