"""What a package imports on first use, so that importing the package alone imports no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
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
            formatter.for_type_by_name(*class_path.rsplit(".", 1), _imported_with_first(*function.rsplit(".", 1)))


def _imported_with_first(module: str, function: str) -> Callable[[Any], str]:
    return lambda value: getattr(importlib.import_module(module), function)(value)


def on_first_use(
    package: str,
    homes: Mapping[str, str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    refusal: type[Exception] = ImportError,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a ``package``; ``homes``: name -> module that has it, or that is it.

    ``elsewhere``: name that it does not have -> what to write instead; ``refusal`` is then raised: Python hides an
    AttributeError from ``from PACKAGE import NAME``.
    """

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
