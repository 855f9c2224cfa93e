"""The numbers of ``omnitrain data stats``, in a terminal, in a notebook, on a page and in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from omnitrain.page.text import as_text
from omnitrain.page.whole import own_prefix, part_of_notebook, whole_page
from omnitrain.page.write import has_matplotlib, require_matplotlib, write_page
from omnitrain.report.data.numbers import DataNumbers
from omnitrain.report.data.stats_text import stats_lines

_COLUMNS = 120  # of the text


@dataclass(frozen=True)
class DataStats(DataNumbers):
    """The numbers of a recipe's data. A notebook shows them as HTML, a terminal as text."""

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON has them."""
        return asdict(self)

    def save_json(self, file: str | Path) -> Path:
        """Write the numbers to a JSON file, and return its path."""
        path = Path(file)
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    def save(self, file: str | Path) -> Path:
        """Write one page that needs nothing else, and return its path. An older page there is replaced.

        Raises:
            UserError: matplotlib is missing, or the file is something else.
        """
        return write_page(whole_page(self.name, "statistics of the data", self._chapters("f")), Path(file))

    def _repr_html_(self) -> str | None:
        return part_of_notebook(self._chapters(own_prefix())) if has_matplotlib() else None  # a notebook shows the text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from stats_lines(self)

    def __str__(self) -> str:
        return as_text(self, columns=_COLUMNS)

    def __repr__(self) -> str:
        return str(self)

    def _chapters(self, prefix: str) -> list[str]:
        require_matplotlib("a page about data")
        from omnitrain.report.chapters.plots import Plots
        from omnitrain.report.data.stats_html import chapters

        return chapters(self, Plots([self.name], prefix))
