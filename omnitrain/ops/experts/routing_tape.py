"""Record a router's decisions in a forward, and replay them when its layer is recomputed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Made = TypeVar("Made")


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
        return _open(self._made, None, _Record(self._indices))

    def replaying(self) -> AbstractContextManager[None]:
        """Return the context of a recomputation; it may be used several times."""
        return _open(self._made, deque(self._made), _Replay(self._indices))


class _TopK(TorchFunctionMode):
    """Takes the indices of every ``topk`` from ``_of``. torch.compile tells the two modes apart by their classes."""

    def __init__(self, indices: list[Tensor]) -> None:
        super().__init__()
        self._indices = indices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return top_k_at(self._of(func, args, given), *args, **given) if is_top_k(func) else func(*args, **given)

    def _of(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        raise NotImplementedError


class _Record(_TopK):
    def _of(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        with torch.no_grad():
            self._indices.append(function(*args, **kwargs).indices)
        return self._indices[-1]


class _Replay(_TopK):
    def __init__(self, indices: list[Tensor]) -> None:
        super().__init__(indices)
        self._left = iter(indices)

    def _of(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        return next(self._left)


def is_top_k(function: Any) -> bool:
    """Whether ``function`` is ``torch.topk`` or ``Tensor.topk``."""
    return function in (torch.topk, torch.Tensor.topk)


def top_k_at(indices: Tensor, input: Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
    """Return the result of ``torch.topk`` for given ``indices``."""
    return torch.return_types.topk((input.gather(dim, indices), indices))


# What the running forward has made, and what its recomputation has not taken yet; None: it is not the recomputation.
_reel: ContextVar[tuple[list[Any], deque[Any] | None] | None] = ContextVar("routing_tape", default=None)


@contextmanager
def _open(made: list[Any], replayed: deque[Any] | None, mode: _TopK) -> Iterator[None]:
    token = _reel.set((made, replayed))
    try:
        with mode:
            yield
    finally:
        _reel.reset(token)


def cached_for_recompute(make: Callable[[], Made]) -> Made:
    """Return the result of ``make()``; in a recomputation, its result in the forward."""
    if (reel := _reel.get()) is None:
        return make()
    made, replayed = reel
    if replayed is not None:
        return replayed.popleft()
    made.append(make())
    return made[-1]


def is_replaying() -> bool:
    """Whether this is the recomputation of a recorded forward."""
    return (reel := _reel.get()) is not None and reel[1] is not None
