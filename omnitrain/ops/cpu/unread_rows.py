"""Skip tokens that no loss reads.

A loss reads the last hidden states only of tokens before a supervised token. Modules after the last mixing of tokens
(the MLP of the last block, its query and output projections, the norms between) work token by token, so they need not
compute the other tokens: losses and gradients do not change.
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
from torch import Tensor, nn

from omnitrain.ops.patch_forward import Forward, forward_of, set_forward
from omnitrain.ops.registry import Backend


@dataclass(frozen=True, eq=False)
class ReadRows:
    """The tokens whose last hidden states are read."""

    rows: Tensor  # [n] int64, unique
    length: int  # T, number of tokens of the whole sequence

    @property
    def flags(self) -> Tensor:
        """``[T]`` bool: whether a token is read."""
        return torch.zeros(self.length, dtype=torch.bool, device=self.rows.device).index_fill_(0, self.rows, True)


UNREAD_ROWS = (Backend("skip", lambda: True, automatic=("cpu",)), Backend("torch", lambda: False))

_read: ContextVar[ReadRows | None] = ContextVar("read_rows", default=None)

# Parents of the skipping linear layers; those that attend are the last attention.
_last_to_mix: WeakSet[nn.Module] = WeakSet()


@contextmanager
def reading(read: ReadRows | None) -> Iterator[None]:
    """Declare which tokens of the forward's last hidden states are read; None: all. A recompute needs it again."""
    token = _read.set(read)
    try:
        yield
    finally:
        _read.reset(token)


def rows_read() -> ReadRows | None:
    """Return the tokens that are read of the running forward; None: all."""
    return _read.get()


def rows_read_of(module: nn.Module, length: int) -> ReadRows | None:
    """Return the tokens that are read of an attention's output; None: all, because it is not the last attention.

    If it has another number of tokens (``length``) than the forward, all are read.
    """
    read = _read.get() if module in _last_to_mix else None
    return read if read is not None and read.length == length else None


def skip_unread_rows(model: nn.Module, names: Sequence[str]) -> Counter[str]:
    """Let modules compute only the tokens that are read, and return zeros for the other tokens, inside :func:`reading`.

    Exact only for modules in which each token reaches only the same token of the last hidden states. Parameters and
    names stay. Tokens are dim 1 of the input ``[1, T, ...]``. On other inputs (DTensors, too), outside of
    :func:`reading` and in a compiled block the modules run as before. In ``names``, items of a module list have their
    index from its end: ``model.layers.-1.mlp``. Returns class name -> number of modules.
    """
    modules = [submodule(model, name) for name in names]
    for name, module in zip(names, modules, strict=True):
        if isinstance(module, nn.Linear) and "." in name:
            _last_to_mix.add(submodule(model, name.rpartition(".")[0]))
        set_forward(module, _on_read_rows(forward_of(module)))
    return Counter(type(module).__name__ for module in modules)


def name_from_end(model: nn.Module, name: str) -> str:
    """Return the name of a module with items of a module list by their index from its end."""
    parts, module = [], model
    for part in name.split("."):
        parts.append(str(int(part) - len(module)) if isinstance(module, nn.ModuleList) else part)
        module = module.get_submodule(part)
    return ".".join(parts)


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a name from :func:`name_from_end`."""
    module = model
    for part in name.split("."):
        module = module[int(part)] if isinstance(module, nn.ModuleList) else module.get_submodule(part)
    return module


def _on_read_rows(plain: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        read = None if torch.compiler.is_compiling() else _read.get()
        if read is None or type(x) is not Tensor or x.ndim < 3 or x.shape[:2] != (1, read.length):
            return plain(self, x)
        y = plain(self, x.index_select(1, read.rows))
        return y.new_zeros(1, read.length, *y.shape[2:]).index_copy(1, read.rows, y)

    return forward
