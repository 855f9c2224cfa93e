"""Write a page to a file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from omnitrain.errors import UserError
from omnitrain.packages import install_command
from omnitrain.page.whole import MARK


def has_matplotlib() -> bool:
    """Return whether figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(what: str) -> None:
    """Check that figures can be drawn.

    Args:
        what: what needs them, for the message.

    Raises:
        UserError: matplotlib is missing.
    """
    if not has_matplotlib():
        raise UserError(f"{what} needs matplotlib; {install_command('report')}")


def write_page(text: str, output: Path) -> Path:
    """Write a page to a file, and return the file. An older page there is replaced; its folder is created.

    Raises:
        UserError: the file is something else, or cannot be written.
    """
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
