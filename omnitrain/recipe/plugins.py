"""Import a user's modules, so that a recipe can name the classes that they register."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from omnitrain.errors import UserError


def import_plugin(name: str) -> str:
    """Import ``package.module`` or ``folder/file.py``, also for new processes; return its name, or a UserError."""
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
    importlib.invalidate_caches()  # the file may be newer than the cached listing of its folder
    module = importlib.import_module(file.stem)
    if Path(module.__file__ or "").resolve() != file:
        raise ImportError(f"a module {file.stem!r} exists already ({module.__file__ or 'built in'}); rename the file")
    return module
