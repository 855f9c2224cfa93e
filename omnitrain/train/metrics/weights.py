"""The progress of reading weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from omnitrain.models.hf.stored_values import FILES
from omnitrain.train.metrics.progress import Activity

_LEAST_SECONDS = 1.0  # a shorter load is not worth a line


class _Reading:
    """What this rank has read so far; the first tensor starts the clock."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = 0.0

    def on_read(self) -> None:
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last, FILES.num_bytes

    @property
    def seconds(self) -> float:
        return 0.0 if self._first is None else self._last - self._first[0]

    @property
    def line(self) -> str:
        megabytes = 0.0 if self._first is None else (FILES.num_bytes - self._first[1]) / 1e6
        rate = megabytes / max(self.seconds, 1e-3)
        return f"weights: {megabytes:,.0f} MB read by rank 0 in {self.seconds:,.0f} s ({rate:,.0f} MB/s)"


@contextmanager
def weights_shown(console: Console) -> Iterator[None]:
    """Show how much of its weights this rank reads, and how fast; in the end in one line, if it took long."""
    reading = _Reading()

    def on_read() -> None:
        reading.on_read()
        activity.update(reading.line)

    with Activity(console, "weights") as activity:
        FILES.on_read = on_read
        try:
            yield
        finally:
            FILES.on_read = None
    if reading.seconds >= _LEAST_SECONDS:
        console.print(reading.line, markup=False, soft_wrap=True)
