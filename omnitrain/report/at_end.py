"""Write the report of a run when it ends; nothing that goes wrong with it ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

REPORT_FILE = "report.html"


def report_at_end(folder: Path, say: Callable[[str], Any]) -> Callable[..., None]:
    """Return an exit callback for an ``ExitStack``, which writes ``report.html`` unless an error ended the run.

    Args:
        folder: folder of the run.
        say: prints one line, which tells where the report is, or why there is none.
    """

    def write(kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            return
        try:
            from omnitrain.report.write import write_report

            say(f"report: {write_report([folder], folder / REPORT_FILE)}")
        except Exception as problem:  # a page that cannot be drawn must not fail hours of training
            words = " ".join(str(problem).split()) or type(problem).__name__
            say(f"no report was written: {words}; `omnitrain report {folder}` tries again")

    return write
