"""Rows that nobody reads.

A loss reads the last hidden states of few rows: those whose successor is trained. What works row by row behind the last
mixing of rows (the MLP of the last block, its query and output projections, the norms between) need not be computed for
the others: it would change neither a loss nor a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from omnitrain.ops.patch_forward import Forward, forward_of, set_forward
from omnitrain.ops.registry import Backend


@dataclass(frozen=True, eq=False)
class ReadRows:
    """Which rows of the last hidden states are read.

    Attributes:
        rows: ``[n]`` int64, each once.
        length: ``T``, of the whole row.
    """

    rows: torch.Tensor
    length: int

    @property
    def flags(self) -> torch.Tensor:
        """``[T]`` bool: whether a row is read."""
        return torch.zeros(self.length, dtype=torch.bool, device=self.rows.device).index_fill_(0, self.rows, True)


UNREAD_ROWS = (Backend("skip", lambda: True, automatic=("cpu",)), Backend("torch", lambda: False))

_read: ContextVar[ReadRows | None] = ContextVar("read_rows", default=None)

# Whose own linear layers work behind the last mixing of rows: the mixing itself, if they attend.
_last_to_mix: WeakSet[nn.Module] = WeakSet()


@contextmanager
def reading(read: ReadRows | None) -> Iterator[None]:
    """Of the forward inside, only these rows of the last hidden states are read; None: all of them.

    A recomputation of activations needs it again.
    """
    token = _read.set(read)
    try:
        yield
    finally:
        _read.reset(token)


def rows_read() -> ReadRows | None:
    """The rows that are read of the forward that is running; None: all."""
    return _read.get()


def rows_read_of(module: nn.Module, length: int) -> ReadRows | None:
    """The rows that are read of what ``module`` attends; None: all, as it is not the last to do so.

    Args:
        module: an attention layer.
        length: rows that it attends over; if these are not those of the forward, all are read.
    """
    read = _read.get() if module in _last_to_mix else None
    return read if read is not None and read.length == length else None


def skip_unread_rows(model: nn.Module, names: Sequence[str]) -> Counter[str]:
    """Make modules compute the rows that are read, and put zeros in the place of the others, inside :func:`reading`.

    Exact only for modules of which a row reaches the same row of the last hidden states and no other. Their parameters
    and names stay. Rows are dim 1 of their input ``[1, T, ...]``; on any other input (a DTensor, too), outside of
    :func:`reading` and in a compiled block, they do what they did before.

    Args:
        model: in which they are; changed in place.
        names: of the modules, with items of a module list by their place from its end: ``model.layers.-1.mlp``.

    Returns:
        Class name -> number of modules.
    """
    modules = [submodule(model, name) for name in names]
    for name, module in zip(names, modules, strict=True):
        if isinstance(module, nn.Linear) and "." in name:
            _last_to_mix.add(submodule(model, name.rpartition(".")[0]))
        set_forward(module, _on_read_rows(forward_of(module)))
    return Counter(type(module).__name__ for module in modules)


def name_from_end(model: nn.Module, name: str) -> str:
    """``name`` of a module of ``model``, with items of a module list by their place from its end."""
    parts, module = [], model
    for part in name.split("."):
        parts.append(str(int(part) - len(module)) if isinstance(module, nn.ModuleList) else part)
        module = module.get_submodule(part)
    return ".".join(parts)


def submodule(model: nn.Module, name: str) -> nn.Module:
    """The inverse of :func:`name_from_end`."""
    module = model
    for part in name.split("."):
        module = module[int(part)] if isinstance(module, nn.ModuleList) else module.get_submodule(part)
    return module


def _on_read_rows(plain: Forward) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        read = None if torch.compiler.is_compiling() else _read.get()
        if read is None or type(x) is not torch.Tensor or x.ndim < 3 or x.shape[:2] != (1, read.length):
            return plain(self, x)
        y = plain(self, x.index_select(1, read.rows))
        return y.new_zeros(1, read.length, *y.shape[2:]).index_copy(1, read.rows, y)

    return forward
