"""``omnitrain report``: write the page about runs to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnitrain.page.write import require_matplotlib, write_page
from omnitrain.report.run_record import read_runs


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write one page about the runs in ``folders``.

    Args:
        folders: folders of runs, at least one.
        output: the file. An older report there is replaced; its folder is created.

    Returns:
        ``output``.

    Raises:
        UserError: matplotlib is missing, a folder has no run or a run without metrics, or the file cannot be written.
    """
    runs = read_runs(folders)
    require_matplotlib("a report")
    from omnitrain.report.page import page_of

    return write_page(page_of(runs), output)
