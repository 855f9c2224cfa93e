"""Gradients of weights that a backward leaves for later.

What a backward hands on are gradients of activations. Those of weights are needed by nobody before the parameters are
reduced, so they can be computed while something else is on its way::

    plain        dX dW | wait for an exchange | dX dW ...
    split off    dX | dW while the exchange goes on | dX ...

The products are the same ones on the same operands, so nothing changes, not even in the last bit.
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
    """Those of one backward, by keys of the caller's; they hold on to their operands until :meth:`made`.

    Args:
        around: makes a context in which they are computed.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._waiting: list[tuple[Any, MakeGradient]] = []
        self._around = around

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Hashable, make: MakeGradient) -> None:
        """Leave a gradient for later; there may be several of one key, which add up to its gradient."""
        self._waiting.append((key, make))

    def of(self, key: Hashable) -> Later:
        """:meth:`add` for ``key``."""
        return partial(self.add, key)

    def made(self, order: Callable[[Any], int] = lambda key: 0) -> Iterator[tuple[Any, Tensor]]:
        """Compute what waits, one after the other; each lets go of its operands. Nothing waits afterwards.

        Args:
            order: of a key; those of one place in it come as they were left.
        """
        waiting, self._waiting = sorted(self._waiting, key=lambda left: order(left[0]))[::-1], []
        with self._around():
            while waiting:
                key, make = waiting.pop()
                yield key, make()

    def accumulate(self) -> None:
        """Compute what waits, and add it to the ``grad`` of the parameters that are its keys."""
        for parameter, gradient in self.made():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@contextmanager
def delayed_linears(modules: Iterable[nn.Module], work: WeightGradients) -> Iterator[None]:
    """In forwards inside, ``nn.Linear`` layers leave their weights' gradients to ``work``, by parameter.

    For schedules that place the weights' part of a backward themselves; who does must call ``work.accumulate()`` before
    anything reads ``grad``. Biases and frozen weights are as always.

    Args:
        modules: whose linear layers; none of subclasses, nor what has another forward already.
        work: takes the gradients in backwards, whenever they are.
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
    """A linear layer whose weight's gradient is left for later."""

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
