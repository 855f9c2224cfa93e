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

        def recorded(compute: Callable[[], Tensor]) -> Tensor:
            with torch.no_grad():
                self._indices.append(compute())
            return self._indices[-1]

        return _open(self._made, None, recorded)

    def replaying(self) -> AbstractContextManager[None]:
        """Return the context of a recomputation; it may be used several times."""
        left = iter(self._indices)
        return _open(self._made, iter(self._made), lambda _: next(left))


class _TopK(TorchFunctionMode):
    """Takes the indices of every ``topk`` from ``indices_of``, which gets a function that computes them."""

    def __init__(self, indices_of: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self._indices_of = indices_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not is_top_k(func):
            return func(*args, **given)
        return top_k_at(self._indices_of(lambda: func(*args, **given).indices), *args, **given)


def is_top_k(function: Any) -> bool:
    """Whether ``function`` is ``torch.topk`` or ``Tensor.topk``."""
    return function in (torch.topk, torch.Tensor.topk)


def top_k_at(indices: Tensor, input: Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
    """Return the result of ``torch.topk`` for given ``indices``."""
    return torch.return_types.topk((input.gather(dim, indices), indices))


# What the running forward has made, and what its recomputation has not taken yet; None: it is not the recomputation.
_reel: ContextVar[tuple[list[Any], Iterator[Any] | None] | None] = ContextVar("routing_tape", default=None)


@contextmanager
def _open(
    made: list[Any], replayed: Iterator[Any] | None, indices_of: Callable[[Callable[[], Tensor]], Tensor]
) -> Iterator[None]:
    token = _reel.set((made, replayed))
    try:
        with _TopK(indices_of):
            yield
    finally:
        _reel.reset(token)


def cached_for_recompute(make: Callable[[], Made]) -> Made:
    """Return the result of ``make()``; in a recomputation, its result in the forward."""
    if (reel := _reel.get()) is None:
        return make()
    made, replayed = reel
    if replayed is not None:
        return next(replayed)
    made.append(make())
    return made[-1]


def is_replaying() -> bool:
    """Whether this is the recomputation of a recorded forward."""
    return (reel := _reel.get()) is not None and reel[1] is not None
