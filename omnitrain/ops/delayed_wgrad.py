"""Delay the gradients of weights in a backward, to compute them during communication.

The rest of the backward needs only the gradients of activations; weight gradients are needed only when parameters are
reduced. The matmuls and their operands are the same, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, reduce
from itertools import groupby
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

MakeGradient = Callable[[], Tensor]
Later = Callable[[MakeGradient], None]


class WeightGradients:
    """Delayed weight gradients by a key of the caller; they keep their operands until computed, inside ``around()``."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._waiting: list[tuple[Any, MakeGradient]] = []
        self._around = around

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Hashable, make: MakeGradient) -> None:
        """Delay a gradient. A key may have several gradients; the caller of :meth:`made` must sum them."""
        self._waiting.append((key, make))

    def of(self, key: Hashable) -> Later:
        """Return :meth:`add` with ``key`` bound."""
        return partial(self.add, key)

    def made(self, order: Callable[[Any], int] = lambda key: 0) -> Iterator[tuple[Any, Tensor]]:
        """Compute the delayed gradients one by one, sorted by ``order`` of their keys; each then releases operands."""
        waiting, self._waiting = sorted(self._waiting, key=lambda left: order(left[0]))[::-1], []
        with self._around():
            while waiting:
                key, make = waiting.pop()
                with torch.no_grad():  # a graph would keep the operands as long as the gradient
                    gradient = make()
                yield key, gradient

    def accumulate(self) -> None:
        """Compute the delayed gradients and add their sums, as autograd does, to ``grad`` of their parameters."""
        first: dict[Any, int] = {}
        for index, (parameter, _) in enumerate(self._waiting):
            first.setdefault(parameter, index)
        for _, of_one in groupby(self.made(first.__getitem__), key=lambda made: first[made[0]]):
            parameter, gradient = reduce(lambda total, made: (total[0], total[1] + made[1]), of_one)
            whole = _like(parameter, gradient)
            with torch.no_grad():
                parameter.grad = whole if parameter.grad is None else parameter.grad.add_(whole)


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of this rank's shard in the form of the parameter: a DTensor if that is one."""
    if not isinstance(parameter, DTensor):
        return gradient
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        gradient, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


_delayed_to: ContextVar[WeightGradients | None] = ContextVar("delayed_weight_gradients", default=None)


def delayed_to() -> WeightGradients | None:
    """Return the collection of the running forward's delayed weight gradients; None: it does not delay them."""
    return _delayed_to.get()


@contextmanager
def delaying(work: WeightGradients | None) -> Iterator[None]:
    """Let forwards inside this context delay the weight gradients of all linear layers, by parameter; None: nothing.

    It covers calls of ``torch.nn.functional.linear`` with a trained parameter as weight, as ``nn.Linear`` makes, and
    the matrices of experts (:func:`~omnitrain.ops.experts.entry.omnitrain_experts`). Modules do not change, so
    micro-batches in flight may have different stores. A recomputation must enter the context of its forward again
    (:func:`delayed_to`). Biases and frozen weights do not change.

    For schedules that place weight gradients themselves: the caller must call ``work.accumulate()`` before anything
    reads ``grad``.
    """
    token = _delayed_to.set(work)
    try:
        with nullcontext() if work is None else _replaced_linear():
            yield
    finally:
        _delayed_to.reset(token)


_linear = F.linear  # the function that is replaced; another library may have wrapped torch's
_num_open = 0  # contexts, in all threads
_lock = Lock()


@contextmanager
def _replaced_linear() -> Iterator[None]:
    """Let ``torch.nn.functional.linear`` ask where its forward delays; in a forward that does not, nothing changes.

    A torch function mode would also see every other operation, which costs a tenth of a small model's forward.
    """
    global _linear, _num_open
    with _lock:
        if not _num_open:
            _linear, F.linear = F.linear, _linear_or_delayed
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open:
                F.linear = _linear


def _linear_or_delayed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    work = _delayed_to.get()
    is_trained = weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
    if work is None or not is_trained or isinstance(weight, DTensor):
        return _linear(input, weight, bias)
    return _DelayedLinear.apply(input, weight, bias, work.of(weight))


class _DelayedLinear(torch.autograd.Function):
    """A linear layer that delays its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return _linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.size(0))
        ctx.later(lambda: rows.t() @ x.reshape(-1, weight.size(1)))
        of_x = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return of_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
