"""Packs of a recipe as people look at them: in a terminal, in a notebook, on a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup
from rich.console import RenderableType
from rich.text import Text

from omnitrain.report.data.medium import FramesOf
from omnitrain.report.data.pack_html import preview_html
from omnitrain.report.data.pack_text import pack_lines, rejected_lines
from omnitrain.report.data.pack_view import PackView, RejectedView
from omnitrain.report.data.shown import Shown


@dataclass(frozen=True, repr=False)
class DataPreview(Shown):
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
    title: ClassVar[str] = "preview of the data"

    def lines(self) -> Iterator[RenderableType]:
        """Yield what a terminal shows."""
        for number, pack in enumerate(self.packs, 1):
            yield from pack_lines(number, pack, self.frames)
        yield from rejected_lines(self.rejected)
        yield from (Text(f"note: {line}") for line in self.unread)

    def chapters(self) -> Markup:
        """Return the chapters of a page."""
        return preview_html(self.packs, self.rejected, self.frames, self.unread)
