"""Lazy imports of a package: importing the package alone imports no torch."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omnitrain.packages import require_fitting_torchvision


def show_in_notebooks(shown: Mapping[str, str]) -> None:
    """In a notebook, show values of a ``MODULE.CLASS`` as HTML by a ``MODULE.FUNCTION``, imported with the first."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        for class_path, function in shown.items():
            formatter.for_type_by_name(*class_path.rsplit(".", 1), _on_first_call(*function.rsplit(".", 1)))


def _on_first_call(module: str, function: str) -> Callable[[Any], str]:
    return lambda value: getattr(importlib.import_module(module), function)(value)


def homes_in(package: str, file: str) -> dict[str, str]:
    """Return name -> module that has it, or that is it, of what a package's ``file`` imports ``if TYPE_CHECKING``."""
    blocks = [block for block in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(block, ast.If)]
    imports = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    found = {name.name: str(one.module) for one in imports for name in one.names}
    return {name: f"{home}.{name}" if home == package else home for name, home in found.items()}


def on_first_use(
    package: str,
    file: str,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    refusal: type[Exception] = ImportError,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a ``package``, whose ``file`` imports its names ``if TYPE_CHECKING``.

    ``elsewhere``: name that it does not have -> what to write instead; ``refusal`` is then raised: Python hides an
    AttributeError from ``from PACKAGE import NAME``.
    """
    homes = homes_in(package, file)

    def get(name: str) -> Any:
        if name in elsewhere:
            raise refusal(f"{package} has no {name}: {elsewhere[name]}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        require_fitting_torchvision()
        module = importlib.import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
