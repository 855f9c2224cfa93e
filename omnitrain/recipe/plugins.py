"""Modules of the user's own, imported so that the classes they register have names in a recipe."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from omnitrain.errors import UserError


def import_plugin(name: str) -> str:
    """Import a module; one that was imported already is left as it is.

    Args:
        name: ``package.module``, or ``folder/file.py``, whose folder is put on the module search path: a process that
            starts afresh, such as a data worker, must find the module by its name.

    Returns:
        ``name``, unchanged.

    Raises:
        UserError: it cannot be imported, and why.
    """
    try:
        _load_file(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:  # a user's module may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"plugin {name!r} cannot be imported ({reason}); expected MODULE or FILE.py") from None
    return name


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    module = importlib.import_module(file.stem)
    if Path(module.__file__ or "").resolve() != file:
        raise ImportError(f"a module {file.stem!r} exists already ({module.__file__ or 'built in'}); rename the file")
    return module
