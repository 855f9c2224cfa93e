"""Delay the gradients of weights in a backward.

The rest of the backward needs only the gradients of activations. Weight gradients are needed only when parameters are
reduced, so we can compute them during communication::

    plain      dX dW | wait for communication | dX dW ...
    delayed    dX | dW during communication | dX ...

The matmuls and their operands are the same, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MakeGradient = Callable[[], Tensor]
Later = Callable[[MakeGradient], None]


class WeightGradients:
    """Delayed weight gradients by a key of the caller; they keep their operands until :meth:`made`.

    Args:
        around: makes the context in which they are computed.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._waiting: list[tuple[Any, MakeGradient]] = []
        self._around = around

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Hashable, make: MakeGradient) -> None:
        """Delay a gradient; several gradients of one key must be summed."""
        self._waiting.append((key, make))

    def of(self, key: Hashable) -> Later:
        """Return :meth:`add` with ``key`` bound."""
        return partial(self.add, key)

    def made(self, order: Callable[[Any], int] = lambda key: 0) -> Iterator[tuple[Any, Tensor]]:
        """Compute the delayed gradients one by one; each then releases its operands.

        Args:
            order: key -> sort key; the sort is stable.
        """
        waiting, self._waiting = sorted(self._waiting, key=lambda left: order(left[0]))[::-1], []
        with self._around():
            while waiting:
                key, make = waiting.pop()
                yield key, make()

    def accumulate(self) -> None:
        """Compute the delayed gradients and add them to ``grad`` of their keys, which are parameters."""
        for parameter, gradient in self.made():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@contextmanager
def delayed_linears(modules: Iterable[nn.Module], work: WeightGradients) -> Iterator[None]:
    """Let ``nn.Linear`` layers delay their weight gradients in forwards inside this context, by parameter.

    For schedules that place weight gradients themselves: the caller must call ``work.accumulate()`` before anything
    reads ``grad``. Biases and frozen weights do not change.

    Args:
        modules: the modules with the layers; subclasses of Linear and layers with a replaced forward are skipped.
        work: collects the delayed gradients.
    """
    linears: set[nn.Module] = {
        part
        for module in modules
        for part in module.modules()
        if type(part) is nn.Linear and "forward" not in vars(part)
    }
    try:
        for linear in linears:
            linear.forward = partial(_linear, linear, work)
        yield
    finally:
        for linear in linears:
            del linear.forward


def _linear(linear: Any, work: WeightGradients, x: Tensor) -> Tensor:
    if not linear.weight.requires_grad:
        return F.linear(x, linear.weight, linear.bias)
    y: Tensor = _LinearForNow.apply(x, linear.weight, linear.bias, work.of(linear.weight))
    return y


class _LinearForNow(torch.autograd.Function):
    """A linear layer that delays its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.size(0))
        ctx.later(lambda: rows.t() @ x.reshape(-1, weight.size(1)))
        of_x = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return of_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
