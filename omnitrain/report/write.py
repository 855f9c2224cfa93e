"""``omnitrain report``: write the page about runs to a file."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from omnitrain.errors import UserError
from omnitrain.packages import install_command
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
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"a report needs matplotlib; {install_command('report')}")
    from omnitrain.report.page import MARK, page_of

    try:
        if output.is_file() and MARK not in output.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise UserError(f"{output} exists and is no report; name another file with --output")
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.tmp")
        unfinished.write_text(page_of(runs), encoding="utf-8")
        os.replace(unfinished, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); name another file with --output") from None
    return output
