"""The roads of a component's features to who reads them, and of their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from omnitrain.ops.timing import Phase
from omnitrain.parallel.step.feature_exchange import Exchange


class Edge(Protocol):
    """One end of a road. A window goes there by :meth:`send` and :meth:`take`, and back by the other two methods."""

    def send(self, window: int, tensors: Sequence[Tensor]) -> None:
        """Send the features of a window, ``[features that this rank encoded, ...]`` each."""
        ...

    def take(self, window: int) -> tuple[Tensor, ...]:
        """Return the features that this rank reads of a window, ``[features, ...]`` each, without a graph."""
        ...

    def give_back(self, window: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what :meth:`take` returned: ``[features, ...]`` for each tensor that has one."""
        ...

    def take_gradients(self, window: int, num_rows: int) -> list[Tensor]:
        """Return the gradients of what :meth:`send` got, ``[num_rows, ...]`` for each tensor that has one."""
        ...


class GroupEdge:
    """An edge within a group of ranks: an exchange that all of them make at once, or no movement at all.

    Args:
        exchange: makes the exchange of a window; None: each rank encodes what it reads.
        waiting: a context of the exchange, by the phase of the step.
        is_trained: whether gradients go back.
    """

    def __init__(
        self,
        exchange: Callable[[int], Exchange | None],
        waiting: Callable[[Phase], AbstractContextManager[None]],
        *,
        is_trained: bool,
    ) -> None:
        self._exchange, self._waiting, self._is_trained = exchange, waiting, is_trained
        self._exchanges: dict[int, Exchange | None] = {}
        self._there: dict[int, tuple[Tensor, ...]] = {}
        self._back: dict[int, list[Tensor]] = {}

    def send(self, window: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`Edge`; a collective of the group."""
        exchange = self._exchange(window)
        if self._is_trained:
            self._exchanges[window] = exchange
        if exchange is None:
            self._there[window] = tuple(tensor.detach() for tensor in tensors)
            return
        with self._waiting("forward"):
            self._there[window] = exchange.send(tensors)

    def take(self, window: int) -> tuple[Tensor, ...]:
        """See :class:`Edge`."""
        return self._there.pop(window)

    def give_back(self, window: int, gradients: Sequence[Tensor]) -> None:
        """See :class:`Edge`; a collective of the group, if any tensor has a gradient."""
        exchange = self._exchanges.pop(window)
        if exchange is None or not gradients:
            self._back[window] = [*gradients]
            return
        with self._waiting("backward"):
            self._back[window] = exchange.send_back(gradients)

    def take_gradients(self, window: int, num_rows: int) -> list[Tensor]:
        """See :class:`Edge`."""
        return self._back.pop(window)
