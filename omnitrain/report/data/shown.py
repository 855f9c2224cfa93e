"""What a terminal shows as text, a notebook as HTML, and a file as a page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from omnitrain.report.html import part_of_notebook, write_page
from omnitrain.terminal import as_text

_COLUMNS = 120  # of the text


class Shown(ABC):
    """Something that ``print``, a notebook and :meth:`save` show.

    ``name``: what it is about. ``title``: what it is, on a page.
    """

    name: str
    title: ClassVar[str]

    @abstractmethod
    def lines(self) -> Iterable[RenderableType]:
        """Return what a terminal shows."""

    @abstractmethod
    def chapters(self) -> Markup:
        """Return what a page shows."""

    def save(self, file: str | Path) -> Path:
        """Write one page that needs nothing else, and return its path. An older page there is replaced.

        Raises UserError: the file is something else.
        """
        return write_page(self.name, self.title, self.chapters(), Path(file))

    def _repr_html_(self) -> str:
        return part_of_notebook(self.chapters())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines()

    def __str__(self) -> str:
        return as_text(self, columns=_COLUMNS)

    __repr__ = __str__
