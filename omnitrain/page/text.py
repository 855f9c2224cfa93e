"""What rich shows in a terminal, as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def as_text(*shown: RenderableType, columns: int) -> str:
    """Return the lines that a terminal of some ``columns`` shows, without colours, in a notebook, too."""
    stream = io.StringIO()
    console = Console(file=stream, width=columns, color_system=None, force_jupyter=False, highlight=False)
    for one in shown:
        console.print(one)
    return stream.getvalue()
