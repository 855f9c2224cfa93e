"""The output of rich for a terminal, as text."""

from __future__ import annotations

import io
import os

from rich.console import Console, RenderableType


def width_of_text(columns: int) -> int:
    """Return the width of output without a terminal: ``COLUMNS`` of the environment, or else ``columns``."""
    wanted = os.environ.get("COLUMNS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else columns


def as_text(*shown: RenderableType, columns: int) -> str:
    """Return the lines that a terminal of some ``columns`` (or ``COLUMNS``) shows, without colours."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=width_of_text(columns), color_system=None, force_jupyter=False, highlight=False
    )
    for one in shown:
        console.print(one)
    return stream.getvalue()
