"""The progress of a run: a bar on a terminal, a bar and the loss in a notebook, lines elsewhere."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from omnitrain.models.hf.stored_values import FILES
from omnitrain.report.svg import Curve, Points, draw_curves, thinned
from omnitrain.terminal import as_text

_BAR_COLUMNS = 60  # a narrower terminal gets lines
_LINE_SECONDS = 30.0
_NOTEBOOK_SECONDS = 0.2  # between two updates of a notebook's bar
_NOTEBOOK_COLUMNS = 80  # of the bar as text, for viewers without HTML
_MOST_POINTS = 400  # of a notebook's curve
_GAP = "  "


class _State:
    """What is shown: steps, times, and the values of the last line of metrics."""

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.step = steps, done
        self.values: tuple[str, ...] = ()
        self._start = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step of this start, which took longer, and its end

    def advance(self, step: int) -> None:
        self.step = step
        if self._first is None:
            self._first = step, time.monotonic()

    @property
    def count(self) -> str:
        return f"step {self.step}/{self.steps}"

    @property
    def elapsed(self) -> str:
        return _clock(time.monotonic() - self._start)

    @property
    def left(self) -> str:
        """The time left, at the mean pace since the first step."""
        if self._first is None or self.step == self._first[0]:
            return "ETA -:--:--"
        pace = (time.monotonic() - self._first[1]) / (self.step - self._first[0])
        return f"ETA {_clock(pace * (self.steps - self.step))}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Steps, bar and times in one line, the values below, so that no width hides one of them."""
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(self.count, ProgressBar(total=self.steps, completed=self.step), f"{self.elapsed}{_GAP}{self.left}")
        yield row
        for line in _folded(self.values, options.max_width):
            yield Text(line, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def _folded(values: Sequence[str], columns: int) -> list[str]:
    """Put values on as few lines as possible without cutting one."""
    lines: list[str] = []
    for value in values:
        if lines and len(lines[-1]) + len(_GAP) + len(value) <= columns:
            lines[-1] += _GAP + value
        else:
            lines.append(value)
    return lines


class _TerminalBar:
    """A bar that a thread draws from the state."""

    def __init__(self, state: _State, console: Console) -> None:
        live = Live(state, console=console, refresh_per_second=4)
        self.start, self.stop = live.start, live.stop

    def show(self, loss: float, is_line: bool) -> None:
        pass


class _NotebookBar:
    """One output of the cell, replaced as the run goes on: the bar, and the loss below. It needs no widgets."""

    def __init__(self, state: _State, console: Console) -> None:
        self.state = state
        self._losses: Points = []

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(self._drawn(), raw=True, display_id=True)
        self._drawn_at = time.monotonic()

    def show(self, loss: float, is_line: bool) -> None:
        self._losses.append((self.state.step, loss if math.isfinite(loss) else None))
        if len(self._losses) >= 2 * _MOST_POINTS:
            self._losses = thinned(self._losses, _MOST_POINTS)
        if is_line or time.monotonic() - self._drawn_at >= _NOTEBOOK_SECONDS:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._handle.update(self._drawn(), raw=True)
        self._drawn_at = time.monotonic()

    def _drawn(self) -> dict[str, str]:
        state, plain = self.state, as_text(self.state, columns=_NOTEBOOK_COLUMNS)
        bar = f'<progress value="{state.step}" max="{state.steps}" style="width: 40%"></progress>'
        times = f"{state.count}{_GAP}{state.elapsed}{_GAP}{state.left}"
        lines = f"{bar} {times}<br>{html.escape(_GAP.join(state.values))}"
        drawn = f'<div style="font-family: monospace; white-space: pre-wrap">{lines}</div>'
        curve = Curve(0, "loss", self._losses)
        if len(curve.values) > 1:
            drawn += str(draw_curves([curve], "loss of each step", end=state.steps))
        return {"text/plain": plain.rstrip("\n"), "text/html": drawn}


class _Lines:
    """A line for each line of metrics, and where these are rare, every 30 seconds."""

    def __init__(self, state: _State, console: Console) -> None:
        self.state, self.console = state, console

    def start(self) -> None:
        self._printed_at = time.monotonic()

    def show(self, loss: float, is_line: bool) -> None:
        if is_line or time.monotonic() - self._printed_at >= _LINE_SECONDS:
            self._printed_at = time.monotonic()
            values = self.state.values if is_line else (f"loss {loss:.3f}",)
            line = _GAP.join([self.state.count, self.state.left, *values])
            self.console.print(line, markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass


class StepProgress:
    """Shows the steps of a run: a bar on terminals and in notebooks, else lines, at least every 30 seconds."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        """Show ``steps`` in total; an earlier start made the first ``done`` of them."""
        self._state = _State(steps, done)
        has_bar = console.is_terminal and not console.is_dumb_terminal and console.width >= _BAR_COLUMNS
        is_plain = not has_bar or console.quiet
        view = _NotebookBar if console.is_jupyter else _Lines if is_plain else _TerminalBar
        self._view: _NotebookBar | _Lines | _TerminalBar = view(self._state, console)

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._view.stop()

    def advance(self, step: int, loss: float, values: Sequence[str] = ()) -> None:
        """Show that ``step`` steps are done, the last with this loss and, if it has a line of metrics, its values."""
        self._state.advance(step)
        self._state.values = tuple(values) or self._state.values
        self._view.show(loss, is_line=bool(values))


def values_shown(line: Mapping[str, Any]) -> list[str]:
    """Return what :meth:`StepProgress.advance` shows of a line of metrics."""
    values = [f"loss {line['loss']:.3f}", *_heads(line), f"{line['tokens_per_second']:,.0f} tokens/s"]
    if "heldout" in line:
        values += [f"held-out {head}" for head in _heads(line["heldout"])]
    if line["rejected"]:
        values.append(f"rows skipped: {sum(line['rejected'].values())} (rejected.jsonl)")
    return values


def _heads(losses: Mapping[str, Any]) -> list[str]:
    return [f"{name} {head['loss']:.3f}" for name, head in losses["heads"].items() if head["tokens"]]


class Activity:
    """Shows what is being done: on a terminal as it changes, elsewhere a line every 30 seconds."""

    def __init__(self, console: Console, doing: str) -> None:
        self._console = console
        # In a notebook, rich's spinner needs widgets.
        self._status = Status(doing, console=console) if console.is_terminal and not console.quiet else None
        self._printed_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, doing: str) -> None:
        """Show ``doing`` from now on."""
        if self._status is not None:
            self._status.update(doing)
        elif time.monotonic() - self._printed_at >= _LINE_SECONDS:
            self._printed_at = time.monotonic()
            self._console.print(doing, markup=False)


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
