"""Packs of a recipe as people look at them: in a terminal, in a notebook, on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from omnitrain.page.text import as_text
from omnitrain.page.whole import own_prefix, part_of_notebook, whole_page
from omnitrain.page.write import has_matplotlib, require_matplotlib, write_page
from omnitrain.report.data.medium import FramesOf
from omnitrain.report.data.pack_text import pack_lines, rejected_lines
from omnitrain.report.data.pack_view import PackView, RejectedView

_MEDIA_ROOM = 3_000_000  # bytes of a page for media
_COLUMNS = 120  # of the text


@dataclass(frozen=True)
class DataPreview:
    """The first packs of a recipe. A notebook shows it as HTML, a terminal as text.

    Attributes:
        name: name of the recipe.
        packs: the packs, as the model gets them.
        rejected: rows that were read for these packs, and that training skips.
        frames: chooses the frames of a video, as the model reads them.
        unread: keys of the data sets that nothing reads, in words.
    """

    name: str
    packs: tuple[PackView, ...]
    rejected: tuple[RejectedView, ...]
    frames: FramesOf
    unread: tuple[str, ...] = ()

    def save(self, file: str | Path) -> Path:
        """Write one page that needs nothing else, and return its path. An older page there is replaced.

        Raises:
            UserError: matplotlib is missing, or the file is something else.
        """
        return write_page(whole_page(self.name, "preview of the data", self._chapters("f")), Path(file))

    def _repr_html_(self) -> str | None:
        return part_of_notebook(self._chapters(own_prefix())) if has_matplotlib() else None  # a notebook shows the text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, pack in enumerate(self.packs, 1):
            yield from pack_lines(number, pack, self.frames)
        yield from rejected_lines(self.rejected)
        yield from (Text(f"note: {line}") for line in self.unread)

    def __str__(self) -> str:
        return as_text(self, columns=_COLUMNS)

    def __repr__(self) -> str:
        return str(self)

    def _chapters(self, prefix: str) -> Sequence[str]:
        require_matplotlib("a preview as a page")
        from omnitrain.report.chapters.plots import Plots
        from omnitrain.report.data.pack_html import PackPages
        from omnitrain.report.data.stats_html import unread_chapter
        from omnitrain.report.media import MediaBudget

        budget = MediaBudget(_MEDIA_ROOM)
        pages = PackPages(Plots([self.name], prefix), budget, self.frames)
        rejected = pages.rejected(self.rejected)  # first, so that they have room
        packs = [pages.pack(number, pack) for number, pack in enumerate(self.packs, 1)]
        return [*packs, rejected, *unread_chapter(self.unread)]
