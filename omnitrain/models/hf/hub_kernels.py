"""Kernels that transformers takes from other packages where these are installed: linear attention, state space.

transformers wraps its own torch code of such a function (``use_kernel_func_from_hub_with_fallback``); what the wrapper
holds tells which package it would take the kernel from, and whether it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType

from torch import nn

_HELD = {"func_name", "package", "torch_function", "implementation", "is_new_implementation", "applicable_params"}


@dataclass(frozen=True)
class Kernel:
    """One function that a package may replace.

    Attributes:
        name: of the function in the package.
        package: by the name under which Python imports it.
        is_used: the package is installed, and its function runs.
    """

    name: str
    package: str
    is_used: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.package if self.is_used else 'torch'}"


def kernels_of(model: nn.Module) -> tuple[Kernel, ...]:
    """The kernels that the forwards of a model's modules call, by name; often none."""
    found = {
        Kernel(
            held["func_name"].cell_contents, held["package"].cell_contents, held["is_new_implementation"].cell_contents
        )
        for held in _wrappers(model)
    }
    return tuple(sorted(found, key=lambda kernel: kernel.name))


@contextmanager
def torch_kernels(model: nn.Module) -> Iterator[None]:
    """While open, transformers' own torch code runs in their place, as where no package is installed.

    Kernels run on their device only; the code in their place runs on any.
    """
    before: list[tuple[CellType, object]] = []
    try:
        for held in _wrappers(model):
            own = held["torch_function"].cell_contents
            parameters = tuple(inspect.signature(own).parameters)
            changes = {"implementation": own, "is_new_implementation": False, "applicable_params": parameters}
            for name, value in changes.items():
                before.append((held[name], held[name].cell_contents))
                held[name].cell_contents = value
        yield
    finally:
        for cell, value in reversed(before):
            cell.cell_contents = value


def _wrappers(model: nn.Module) -> list[dict[str, CellType]]:
    """What transformers' wrapper around each such function holds, by name; each wrapper once."""
    found: dict[int, dict[str, CellType]] = {}
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        for name in forward.__code__.co_names:
            value = forward.__globals__.get(name)
            if isinstance(value, FunctionType) and set(value.__code__.co_freevars) >= _HELD:
                cells = value.__closure__ or ()
                found[id(value)] = dict(zip(value.__code__.co_freevars, cells, strict=True))
    return list(found.values())
