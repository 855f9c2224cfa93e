"""The console that a run prints to. Only rank 0 prints."""

from __future__ import annotations

from rich.console import Console

from omnitrain.terminal import width_of_text
from omnitrain.train.launch.environment import global_rank

_COLUMNS = 120  # without a terminal, and without COLUMNS

console = Console(highlight=False, quiet=global_rank() > 0)
if not console.is_terminal:
    console = Console(highlight=False, quiet=global_rank() > 0, width=width_of_text(_COLUMNS))
