"""Functions and classes of the user's own that a recipe names as ``FILE.py:NAME`` or ``MODULE:NAME``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from omnitrain.errors import UserError


def _name_of(value: Any) -> Any:
    """Return the name under which every rank, and a resumed run, finds a function; names stay as they are."""
    if not callable(value):
        return value
    name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None)
    if not name.isidentifier() or module is None:
        raise ValueError(
            "a recipe keeps the name of a function, under which every rank finds it; define it with `def` in a file, "
            "outside of other functions"
        )
    return f"{module}:{name}"


def _with_function(name: str) -> str:
    """Return a name that says both where the function is and what it is called."""
    source, _, function = name.rpartition(":")
    if source and function.isidentifier():
        return name
    module, _, last = name.strip(":").rpartition(".")
    likely = f"{module}.py:FUNCTION" if last == "py" else f"{module or 'FILE.py'}:{last}"
    raise ValueError(f"found {name!r}; expected FILE.py:FUNCTION or MODULE:FUNCTION, such as {likely}")


FunctionName = Annotated[str, BeforeValidator(_name_of, json_schema_input_type=str), AfterValidator(_with_function)]


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Load the function or class ``FILE.py:NAME`` or ``MODULE:NAME``; raise a UserError for ``key`` if that fails."""
    source, _, function = name.rpartition(":")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        loaded = getattr(module, function)
        if not callable(loaded):
            raise TypeError(f"{function} is not a function")
    except Exception as error:  # a user's file may fail in any way
        raise UserError(
            f"{key}: {name!r} cannot be loaded ({error}); expected FILE.py:FUNCTION or MODULE:FUNCTION"
        ) from None
    else:
        return loaded


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_plugin(name: str) -> str:
    """Import ``package.module`` or ``folder/file.py``, also for new processes; return its name, or a UserError."""
    try:
        _import_file(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:  # a user's module may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"plugin {name!r} cannot be imported ({reason}); expected MODULE or FILE.py") from None
    return name


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    importlib.invalidate_caches()  # the file may be newer than the cached listing of its folder
    module = importlib.import_module(file.stem)
    if Path(module.__file__ or "").resolve() != file:
        raise ImportError(f"a module {file.stem!r} exists already ({module.__file__ or 'built in'}); rename the file")
    return module
