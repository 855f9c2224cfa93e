"""Record a router's decisions in a forward, and replay them when its layer is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Made = TypeVar("Made")

_TOP_K = (torch.topk, torch.Tensor.topk)


class RoutingTape:
    """The decisions of one forward of one block: the indices of every ``topk``, and values computed from them.

    In the recomputation a ``topk`` returns the values at the forward's indices, with their gradients, so rounding
    cannot change an expert. Permutations and split sizes are those of the forward, so nothing is counted, exchanged or
    read by the host again.
    """

    def __init__(self) -> None:
        self._indices: list[Tensor] = []
        self._made: list[Any] = []

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of the forward."""
        return _open(self, _Record(self._indices), replays=False)

    def replaying(self) -> AbstractContextManager[None]:
        """Return the context of a recomputation; it may be used several times."""
        return _open(self, _Replay(self._indices), replays=True)


class _Record(TorchFunctionMode):
    def __init__(self, indices: list[Tensor]) -> None:
        super().__init__()
        self._indices = indices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_top_k(func):
            return func(*args, **(kwargs or {}))
        with torch.no_grad():
            self._indices.append(func(*args, **(kwargs or {})).indices)
        return top_k_at(self._indices[-1], *args, **(kwargs or {}))  # what autograd saves must be as in the replay


class _Replay(TorchFunctionMode):
    def __init__(self, indices: list[Tensor]) -> None:
        super().__init__()
        self._left = iter(indices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_top_k(func):
            return top_k_at(next(self._left), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def is_top_k(function: Any) -> bool:
    """Whether ``function`` is ``torch.topk`` or ``Tensor.topk``."""
    return function in _TOP_K


def top_k_at(indices: Tensor, input: Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
    """Return the result of ``torch.topk`` for given ``indices``."""
    return torch.return_types.topk((input.gather(dim, indices), indices))


class _TapeReader:
    """A tape in use, and its read position."""

    def __init__(self, made: list[Any], replays: bool) -> None:
        self._made, self._replays, self._next = made, replays, 0

    def made(self, make: Callable[[], Made]) -> Made:
        if self._replays:
            self._next += 1
            return self._made[self._next - 1]
        self._made.append(make())
        return self._made[-1]


_reel: ContextVar[_TapeReader | None] = ContextVar("routing_tape", default=None)


@contextmanager
def _open(tape: RoutingTape, mode: TorchFunctionMode, *, replays: bool) -> Iterator[None]:
    token = _reel.set(_TapeReader(tape._made, replays))
    try:
        with mode:
            yield
    finally:
        _reel.reset(token)


def cached_for_recompute(make: Callable[[], Made]) -> Made:
    """Return the result of ``make()``; in a recomputation, its result in the forward."""
    reel = _reel.get()
    return make() if reel is None else reel.made(make)


def is_replaying() -> bool:
    """Whether this is the recomputation of a recorded forward."""
    reel = _reel.get()
    return reel is not None and reel._replays
