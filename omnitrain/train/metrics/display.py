"""The terminal output of a run: tables at the start, a progress bar, and a table of scores at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import datasets
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils import logging as hf_logging

from omnitrain.models.components.contract import Contract
from omnitrain.models.hf.unused_weights import unused_line
from omnitrain.models.omni.summary import ComponentRow
from omnitrain.train.launch.environment import global_rank

_NARROW = 120  # columns without a terminal

console = Console(highlight=False, quiet=global_rank() > 0)
if not console.is_terminal:
    console = Console(highlight=False, quiet=global_rank() > 0, width=_NARROW)


def quiet_libraries() -> None:
    """Turn off progress bars and advice of HF libraries; omnitrain prints or raises everything that matters."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # omnitrain raises an error for unreadable files
    hub_logging.set_verbosity_error()  # it logs every retry
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def show_components(rows: list[ComponentRow]) -> None:
    """Print the component table."""
    table = Table("component", "class", "parameters", "trainable", "dtype", "ops", title="Model", title_justify="left")
    for row in rows:
        trainable = f"{row.trainable:,}" if row.trainable else "frozen"
        table.add_row(row.name, row.class_name, f"{row.parameters:,}", trainable, row.dtype, row.ops)
    console.print(table)


def show_contract(contract: Contract, *, in_full: bool) -> None:
    """Print the findings of the contract check; without ``in_full`` only those that did not pass."""
    findings = [finding for finding in contract.findings if in_full or finding.outcome != "passed"]
    if findings:
        table = Table("check", "outcome", "what was measured", title="Contract of the foundation", title_justify="left")
        for finding in findings:
            table.add_row(finding.check, finding.outcome, finding.fact)
        console.print(table)


def show_unused(unused: Mapping[str, int] | None) -> None:
    """Print the tensors of the checkpoint that the foundation does not have, if any."""
    if line := unused_line(unused):
        console.print(line, markup=False)


def show_kept_memory(by_source: Mapping[str, float], pack_tokens: int) -> None:
    """Print the memory that a full pack of each source keeps for its backward, in GiB."""
    shown = ", ".join(f"{source} {size / 2**30:.2f}" for source, size in by_source.items())
    console.print(f"a full pack of {pack_tokens:,} tokens keeps about this much for its backward, in GiB: {shown}")


def show_scores(scores: dict[str, Any], title: str) -> None:
    """Print a table of scores, with shares as percentages."""
    table = Table("held-out", "score", title=title, title_justify="left")
    for name, value in scores.items():
        is_share = isinstance(value, float) and 0 <= value <= 1
        table.add_row(name, f"{100 * value:.1f} %" if is_share else f"{value:.4g}")
    console.print(table)


class StepProgress:
    """A progress bar on a terminal; otherwise one line per tenth of the steps."""

    def __init__(self, steps: int, done: int) -> None:
        """Show ``steps`` in total; an earlier start made the first ``done`` of them."""
        self._steps = steps
        self._printed = 10 * done // steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, status="")

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, step: int, status: str | None = None) -> None:
        """Move to ``step``; ``status`` replaces the text next to the bar."""
        self._bar.update(self._task, completed=step)
        if status:
            self._bar.update(self._task, status=status)
        tenth = 10 * step // self._steps
        if not console.is_terminal and status and tenth > self._printed:
            self._printed = tenth
            console.print(f"step {step}/{self._steps}  {status}")
