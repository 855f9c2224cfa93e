"""Names of a package that are imported on first use, so that importing the package alone imports no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from omnitrain.packages import require_fitting_torchvision


def on_first_use(
    package: str, homes: Mapping[str, str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: name of the package.
        homes: name -> the module that has it.
        elsewhere: name that another library's package of this kind has -> what an ImportError says to write instead.
    """

    def get(name: str) -> Any:
        if name in elsewhere:
            raise ImportError(f"{package} has no {name}: {elsewhere[name]}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        require_fitting_torchvision()
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
