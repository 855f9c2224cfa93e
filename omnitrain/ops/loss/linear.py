"""A loss of logits that a linear head makes chunk by chunk, with its gradients in the forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Memory for logits and their softmax, by device. Each chunk reads and writes the weight's gradient, about 12 bytes per
# 2 x rows operations. On CPU, 447 rows (150k classes, logits and softmax in fp32) hide this cost. A GPU does 200 to 300
# operations in the time of moving a byte, so it needs 1,800 rows (logits in bf16, softmax in fp32).
CHUNK_BYTES = {"cpu": 2**29, "cuda": 3 * 2**29}

# n -> a buffer ``[n, classes]`` in fp32, the same memory at each call.
Wide = Callable[[int], Tensor]
# Logits ``[n, classes]`` of a chunk, its rows among all, a buffer, whether the gradient is wanted -> losses ``[n]`` and
# their gradient ``[n, classes]``, which may lie in the buffer or over the logits.
ChunkLoss = Callable[[Tensor, slice | Tensor, Wide, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class LossTerm:
    """A loss before division: the trainer divides the sum once by the count of the whole global batch.

    Attributes:
        sum: scalar fp32, nats, over the predicted tokens; only this field has a gradient.
        count: number of predicted tokens.
        rows: ``[n]`` fp32 without gradient, the loss of each row; 0 if the label is ignored.
        metrics: name of a metric -> its values, like ``rows``.
    """

    sum: Tensor
    count: int
    rows: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def of_rows(chunks: list[Tensor], rows: Tensor, kept: Tensor | None) -> Tensor:
    """Return the values of a metric for all rows; 0 where the label is ignored."""
    found = torch.cat([rows[:0], *chunks])
    return found if kept is None else torch.zeros_like(rows).index_copy_(0, kept, found)


def own_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, with a graph; None stays None."""
    return None if tensor is None else tensor.to_local()


class LinearLoss(torch.autograd.Function):
    """``kept``: which rows have a loss; None: all."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        chunk_rows: int,
        loss: ChunkLoss,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of ``loss`` over all chunks, and its rows ``[N]`` fp32."""
        number, classes = len(hidden) if kept is None else len(kept), weight.size(0)
        step = min(number, chunk_rows)
        # Buffers for all chunks: fresh memory for each would cost as much time as the softmax.
        logits = hidden.new_empty(step, classes)
        wide = cache(lambda: torch.empty_like(logits, dtype=torch.float32))  # not all losses need it
        grads = _LossGradients(hidden, weight, bias, [with_gradients and needed for needed in ctx.needs_input_grad[:3]])
        rows = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for start in range(0, number, max(1, step)):
            stop = min(start + step, number)
            at = slice(start, stop) if kept is None else kept[start:stop]
            h, x = hidden[at], logits[: stop - start]
            linear(h, weight, bias, out=x)
            rows[at], grad = loss(x, at, lambda n: wide()[:n], grads.wanted)
            if grad is not None:
                grads.add(at, h, weight, grad if grad.dtype == x.dtype else x.copy_(grad))
        ctx.save_for_backward(*grads.finished())
        ctx.spent = False
        ctx.mark_non_differentiable(rows)
        return rows.sum(), rows

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward, once."""
        if torch.is_grad_enabled():
            raise RuntimeError("this loss has no second derivative (create_graph=True); use the plain loss")
        if ctx.spent:
            raise RuntimeError("this loss can be differentiated only once; compute the loss again")
        # In place: another [classes, hidden] would be the largest tensor in memory.
        scaled = [None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors]
        ctx.spent = True
        return (*scaled, None, None, None, None)


def linear(h: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """Write ``h @ weight.T + bias`` to ``out``."""
    if bias is None:
        torch.mm(h, weight.t(), out=out)
    else:
        torch.addmm(bias, h, weight.t(), out=out)


class _LossGradients:
    """The ``wanted`` gradients of hidden, weight and bias; weight's and bias's are sums over chunks, in fp32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self.wanted = any(wanted)
        self._dtype = weight.dtype
        self._hidden = torch.zeros_like(hidden) if wanted[0] else None
        self._weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None

    def add(self, at: slice | Tensor, h: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Take in a chunk: its rows, ``h`` ``[n, hidden]``, and the gradient of its logits ``[n, classes]``."""
        if self._hidden is not None:
            self._hidden[at] = grad @ weight
        if self._weight is not None and grad.dtype == torch.float32:
            self._weight.addmm_(grad.t(), h)
        elif self._weight is not None:
            self._weight += grad.t() @ h
        if self._bias is not None:
            self._bias += grad.sum(0, dtype=torch.float32)

    def finished(self) -> tuple[Tensor | None, ...]:
        """Each in its parameter's dtype."""
        sums = (None if total is None else total.to(self._dtype) for total in (self._weight, self._bias))
        return (self._hidden, *sums)
