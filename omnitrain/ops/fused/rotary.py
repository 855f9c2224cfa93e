"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and the function in a model's file that computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from omnitrain.ops.collectives import with_backward
from omnitrain.ops.registry import Backend, liger_missing

# query [B, H, T, D], key [B, K, T, D], cosine and sine [B or 1, T, R] -> both rotated, same shapes.
Rotary = Callable[..., tuple[Tensor, Tensor]]


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the reference, in transformers' order of operations: feature ``i`` is paired with ``i + R / 2``.

    ``query`` is ``[B, H, T, D]``, ``key`` ``[B, K, T, D]``, ``cos`` and ``sin`` ``[B or 1, T, R]``, all of one floating
    dtype; ``R`` is even. Features after the first ``R`` do not change.
    """
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned


def _liger_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.rope import LigerRopeFunction

    if cos.size(-1) != query.size(-1):  # liger's kernel rotates all features
        return rotary(query, key, cos, sin)
    turned: tuple[Tensor, Tensor] = LigerRopeFunction.apply(query, key, cos, sin)
    return turned


@dataclass(frozen=True)
class _Tables:
    """Cosines and sines, repeated per head so that a CPU multiplies whole rows; ``[B or 1, T, H, D]``.

    Sines of the first half are negative: they multiply the features of the second half.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, heads: int) -> _Tables:
        first, second = sin.chunk(2, dim=-1)
        per_head = (
            x[:, :, None].expand(-1, -1, heads, -1).contiguous() for x in (cos, torch.cat((-first, second), -1))
        )
        return cls(*per_head)

    def turned(self, x_BTHD: Tensor, *, back: bool = False) -> Tensor:
        """:func:`rotary`, in the same order of operations; ``back``: its transpose."""
        heads, half = x_BTHD.size(2), self.cos.size(-1) // 2
        cos, sin = self.cos[:, :, :heads], self.sin[:, :, :heads]
        of_second, of_first = sin.split(half, dim=-1)[:: -1 if back else 1]
        across = torch.empty_like(x_BTHD)
        torch.mul(x_BTHD[..., half:], of_second, out=across[..., :half])
        torch.mul(x_BTHD[..., :half], of_first, out=across[..., half:])
        return (x_BTHD * cos).add_(across)


# The tables of a forward by its cosines, which all layers share; freed with them.
_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def fused_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`rotary`, bit for bit, with a hand-written backward.

    If the tables have gradients, or rotate only some features, it calls :func:`rotary` with autograd.
    """
    if cos.size(-1) != query.size(-1) or cos.requires_grad or sin.requires_grad:
        return rotary(query, key, cos, sin)
    heads = max(query.size(1), key.size(1))
    known_sin, tables = _tables.get(cos, (None, None))
    if known_sin is not sin or tables is None or tables.cos.size(2) != heads:
        tables = _Tables.of(cos, sin, heads)
        _tables[cos] = sin, tables
    # Tokens before heads, as projections lay them out.
    turned: tuple[Tensor, Tensor] = with_backward(
        lambda *states: tuple(tables.turned(x.transpose(1, 2)).transpose(1, 2) for x in states),
        lambda *grads: tuple(tables.turned(x.transpose(1, 2), back=True).transpose(1, 2) for x in grads),
        *(query, key),
    )
    return turned


ROTARY = (
    Backend("fused", fused_rotary, automatic=("cpu",)),
    Backend("torch", rotary),
    Backend("liger", _liger_rotary, liger_missing, automatic=()),
)


def rotary_forward(module: nn.Module, run: Rotary) -> Callable[..., Any] | None:
    """Return the forward of ``module``'s class with ``run`` instead of the rotary function in its file, if any.

    A function named in the forward is the rotary function if its outputs equal :func:`rotary`'s bit for bit. If
    it rotates only the first ``R`` features, so does the new one. Other calls (more arguments, several dtypes) go to
    the model's own function.
    """
    if "forward" in vars(module) or not isinstance(type(module).forward, FunctionType):
        return None
    return _with_rotary(type(module).forward, run)


@cache  # one function for all layers of a class
def _with_rotary(forward: FunctionType, run: Rotary) -> Callable[..., Any] | None:
    named = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    found = {name: f for name, f in named.items() if isinstance(f, FunctionType) and is_rotary(f)}
    if not found:
        return None
    own = forward.__globals__ | {name: _exchanged(function, run) for name, function in found.items()}
    del own["__name__"]  # or torch.compile would look names up in the module of that name
    changed = FunctionType(forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__module__ = forward.__module__
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _exchanged(plain: Rotary, run: Rotary) -> Rotary:
    """Call ``run`` for the recognized kind of call, ``plain`` for other calls and in compiled blocks."""
    partial = is_rotary(plain, partial=True)

    def apply(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or kwargs or len(args) != 4 or not _fits(*args, partial=partial):
            return plain(*args, **kwargs)
        return run(*args)

    return apply


def _fits(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, partial: bool) -> bool:
    if (query.ndim, key.ndim, cos.ndim) != (4, 4, 3) or len({x.dtype for x in (query, key, cos, sin)}) != 1:
        return False
    turning, width = cos.size(-1), query.size(-1)
    return turning == width or (partial and turning < width)


@cache
def is_rotary(function: Callable[..., Any], *, partial: bool = False) -> bool:
    """Whether ``function`` equals :func:`rotary` on random numbers; ``partial``: with fewer rotated features."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, 5, 16), (2, 3, 5, 16), *[(2, 5, 8 if partial else 16)] * 2]
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        return all(
            _behaves_as_rotary(function, [x.to(dtype) for x in values]) for dtype in (torch.float32, torch.bfloat16)
        )


def _behaves_as_rotary(function: Callable[..., Any], values: list[Tensor]) -> bool:
    try:
        theirs = function(*(x.clone() for x in values))
    except Exception:  # it does not take these four arguments
        return False
    if not (isinstance(theirs, tuple) and len(theirs) == 2 and all(isinstance(x, Tensor) for x in theirs)):
        return False
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(theirs, rotary(*values), strict=True))
