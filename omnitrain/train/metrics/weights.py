"""The progress of reading weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from omnitrain.models.hf.stored_values import FILES
from omnitrain.train.metrics.progress import Activity

_LEAST_SECONDS = 1.0  # a shorter load is not worth a line


@contextmanager
def weights_shown(console: Console) -> Iterator[None]:
    """Show how much of its weights this rank reads, and how fast; in the end in one line, if it took long."""
    reads: list[tuple[float, int]] = []  # times and bytes of the first one, which starts the clock, and of the last one
    line = ""

    def on_read() -> None:
        nonlocal line
        reads[1:] = [(time.monotonic(), FILES.num_bytes)]
        seconds, read = (last - first for first, last in zip(reads[0], reads[-1], strict=True))
        rate = read / 1e6 / max(seconds, 1e-3)
        line = f"weights: {read / 1e6:,.0f} MB read by rank 0 in {seconds:,.0f} s ({rate:,.0f} MB/s)"
        activity.update(line)

    with Activity(console, "weights") as activity:
        FILES.on_read = on_read
        try:
            yield
        finally:
            FILES.on_read = None
    if reads and reads[-1][0] - reads[0][0] >= _LEAST_SECONDS:
        console.print(line, markup=False, soft_wrap=True)
