"""Kernels that transformers takes from other packages if they are installed: linear attention, state space.

transformers wraps its torch code of such a function (``use_kernel_func_from_hub_with_fallback``). The closure of the
wrapper shows the package of the kernel, and whether the kernel runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType

from torch import nn

_CLOSURE_NAMES = {
    *("func_name", "package", "torch_function", "implementation", "is_new_implementation", "applicable_params"),
}


@dataclass(frozen=True)
class Kernel:
    """One function that a package may replace."""

    name: str  # name of the function in the package
    package: str  # import name of the package
    is_used: bool  # whether the package is installed, so that its function runs

    def __str__(self) -> str:
        return f"{self.name}: {self.package if self.is_used else 'torch'}"


def kernels_of(model: nn.Module) -> tuple[Kernel, ...]:
    """Return the kernels that the forwards of a model's modules call, sorted by name; often none."""
    names = ("func_name", "package", "is_new_implementation")
    kernels = {Kernel(*(cells[name].cell_contents for name in names)) for cells in _wrappers(model)}
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


@contextmanager
def torch_kernels(model: nn.Module) -> Iterator[None]:
    """Run transformers' torch code, on any device, instead of the kernels, as if no package were installed."""
    before: list[tuple[CellType, object]] = []
    try:
        for cells in _wrappers(model):
            torch_function = cells["torch_function"].cell_contents
            changes = {
                "implementation": torch_function,
                "is_new_implementation": False,
                "applicable_params": tuple(inspect.signature(torch_function).parameters),
            }
            for name, value in changes.items():
                before.append((cells[name], cells[name].cell_contents))
                cells[name].cell_contents = value
        yield
    finally:
        for cell, value in reversed(before):
            cell.cell_contents = value


def _wrappers(model: nn.Module) -> list[dict[str, CellType]]:
    """Return the closure of each wrapper that the forwards call, name -> cell; each wrapper once."""
    cells_of: dict[int, dict[str, CellType]] = {}
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        for name in forward.__code__.co_names:
            value = forward.__globals__.get(name)
            if isinstance(value, FunctionType) and set(value.__code__.co_freevars) >= _CLOSURE_NAMES:
                cells = value.__closure__ or ()
                cells_of[id(value)] = dict(zip(value.__code__.co_freevars, cells, strict=True))
    return list(cells_of.values())
