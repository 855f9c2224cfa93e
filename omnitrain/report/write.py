"""Write a page to a file: that of ``omnitrain report``, and those about data."""

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
    require_matplotlib("a report")
    from omnitrain.report.page import page_of

    return write_page(page_of(runs), output)


def require_matplotlib(what: str) -> None:
    """Check that figures can be drawn.

    Args:
        what: what needs them, for the message.

    Raises:
        UserError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{what} needs matplotlib; {install_command('report')}")


def write_page(text: str, output: Path) -> Path:
    """Write a page to a file, and return the file. An older page there is replaced; its folder is created.

    Raises:
        UserError: the file is something else, or cannot be written.
    """
    from omnitrain.report.page import MARK

    try:
        if output.is_file() and MARK not in output.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise UserError(f"{output} exists and is no report of omnitrain; name another file with --output")
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.tmp")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); name another file with --output") from None
    return output
