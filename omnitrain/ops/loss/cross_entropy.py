"""Cross entropy as a sum, a count and one detached loss per row; with a linear head without computing all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.errors import UserError
from omnitrain.ops.collectives import add_up_gradients, gathered
from omnitrain.ops.compile.blocks import compiler_missing, keep_compilations
from omnitrain.ops.loss import token_functions
from omnitrain.ops.registry import Backend, choose, liger_missing
from omnitrain.torch_private import assert_async

IGNORED = -100  # the label of a row without a loss

# Memory for logits and their softmax, by device. Each chunk reads and writes the weight's gradient, about 12 bytes per
# 2 x rows operations. On CPU, 447 rows (150k classes, logits and softmax in fp32) hide this cost. A GPU does 200 to 300
# operations in the time of moving a byte, so it needs 1,800 rows (logits in bf16, softmax in fp32).
CHUNK_BYTES = {"cpu": 2**29, "cuda": 3 * 2**29}
_BYTES_OF_OWN = 16  # per logit of a user's loss: a copy, what its backward keeps, the gradient, all in fp32

# n -> a buffer ``[n, classes]`` in fp32, the same memory at each call.
Wide = Callable[[int], Tensor]
# Logits ``[n, classes]``, labels ``[n]``, a buffer, whether the gradient is wanted -> losses ``[n]`` fp32 and their
# gradient ``[n, classes]`` = softmax - one-hot, which may lie in the buffer or over the logits.
Softmax = Callable[[Tensor, Tensor, Wide, bool], tuple[Tensor, Tensor | None]]
# The same for the rows of a chunk, which it gets in place of their labels.
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


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    *,
    count: int | None = None,
    function: token_functions.TokenFunction | None = None,
    metrics: Mapping[str, token_functions.TokenFunction] | None = None,
    teachers: token_functions.TeacherRows | None = None,
) -> LossTerm:
    """Like :func:`linear_cross_entropy`, of logits ``[N, classes]``; with a function, labels are never ignored."""
    if count is None:
        count = int((labels != IGNORED).sum())
    if function is None or not len(labels):  # without tokens, a teacher has no rows for functions
        rows = F.cross_entropy(logits.float(), labels, reduction="none", ignore_index=IGNORED)
    else:
        rows = token_functions.token_losses(function, logits.float(), labels, teachers)
    values = dict.fromkeys(metrics or {}, rows.detach())
    if len(labels):
        values = token_functions.token_metrics(metrics or {}, logits, labels, teachers or {})
    return LossTerm(rows.sum(), count, rows.detach(), values)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    count: int | None = None,
    backend: str = "auto",
    function: token_functions.TokenFunction | None = None,
    metrics: Mapping[str, token_functions.TokenFunction] | None = None,
    teachers: token_functions.TeacherRows | None = None,
    chunk_elements: int | None = None,
) -> LossTerm:
    """Compute ``-log softmax(hidden @ weight.T + bias)[labels]``, chunk by chunk.

    A chunk has as many rows as fit ``chunk_elements`` logits (at least one row). The forward also computes the required
    gradients, none under ``no_grad``: three matmuls per chunk, without recomputation. Therefore ``sum`` can be
    differentiated only once: without ``create_graph`` and without a second backward (``retain_graph``).

    Args:
        hidden: ``[N, hidden]``.
        weight: ``[classes, hidden]``, dtype of ``hidden``. Its gradient is summed in fp32. The classes of a DTensor are
            evenly sharded over the ranks of its mesh, and so are those of ``bias``; all ranks call this with the same
            rows and get the loss. Gradients are those of the sum of their results (:mod:`omnitrain.ops.collectives`).
        labels: ``[N]`` int64, each in ``[0, classes)``, or -100: ignored, costs no logits.
        bias: ``[classes]`` or None.
        count: number of labels that are not ignored; None: count them, which waits for the device.
        backend: backend of a chunk's softmax: ``auto``, ``torch``, ``compiled`` or ``liger``.
        function: the loss in place of cross entropy, computed in fp32.
        metrics: name -> metric of the same chunks.
        teachers: name -> hidden states ``[N, width]``, for ``function`` and ``metrics``.
        chunk_elements: the most logits in memory at once; None: a value for the device.

    Returns:
        The loss. Without labels it is 0, and its gradients are zeros.

    Raises:
        UserError: the backend cannot run here, or ``function`` or a metric does not give a value per token.
        RuntimeError: shapes or dtypes do not fit, or a label is out of range; in the backward: ``sum`` was
            differentiated before.
    """
    if count is None:
        count = int((labels != IGNORED).sum())
    kept = None if count == labels.numel() else (labels != IGNORED).nonzero().flatten()
    chosen = choose("cross_entropy", CROSS_ENTROPY, backend, hidden.device)
    group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None  # ranks that share the classes
    if group is not None:
        _require_shardable(backend, function, metrics)
        chosen = SoftmaxBackend("sharded", partial(sharded_softmax, group=group))
        weight, bias = _own(weight), _own(bias)
    if chunk_elements is None:
        buffer_bytes = chosen.buffer_bytes if function is None else _BYTES_OF_OWN
        chunk_elements = CHUNK_BYTES[hidden.device.type] // (hidden.itemsize + buffer_bytes)
    chunk_rows = max(1, chunk_elements // weight.size(0))
    chunks: list[dict[str, Tensor]] = []

    def run(logits: Tensor, at: slice | Tensor, wide: Wide, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Measure the chunk before the softmax, which may write over its logits."""
        of_chunk = {name: rows[at] for name, rows in (teachers or {}).items()}
        if metrics:
            chunks.append(token_functions.token_metrics(metrics, logits, labels[at], of_chunk))
        if function is not None:
            return token_functions.with_gradient_of_logits(function, logits, labels[at], of_chunk, with_gradient)
        return chosen.run(logits, labels[at], wide, with_gradient)

    total, rows = _LinearCrossEntropy.apply(
        hidden, weight, bias, labels, kept, chunk_rows, run, torch.is_grad_enabled()
    )
    values = {name: _of_rows([chunk[name] for chunk in chunks], rows, kept) for name in metrics or {}}
    return LossTerm(total if group is None else add_up_gradients(total, group), count, rows, values)


def _require_shardable(
    backend: str,
    function: token_functions.TokenFunction | None,
    metrics: Mapping[str, token_functions.TokenFunction] | None,
) -> None:
    """Raise UserError for arguments that a vocabulary shared by several ranks does not support."""
    if backend not in ("auto", "torch"):
        raise UserError(f"cross_entropy: {backend} does not support a sharded vocabulary; use torch or auto")
    if function is not None or metrics:
        raise UserError(
            "train.losses and train.metrics need the logits of all classes, but tensor parallel ranks share the "
            "vocabulary; remove them, or set tp to 1"
        )


def _of_rows(chunks: list[Tensor], rows: Tensor, kept: Tensor | None) -> Tensor:
    """The values of a metric for all rows; 0 where the label is ignored."""
    found = torch.cat([rows[:0], *chunks])
    return found if kept is None else torch.zeros_like(rows).index_copy_(0, kept, found)


def _own(tensor: Any) -> Any:
    """This rank's part of a DTensor, with a graph; None stays None."""
    return None if tensor is None else tensor.to_local()


def _torch_softmax(logits: Tensor, labels: Tensor, wide: Wide, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    out = wide(len(logits))
    torch.log_softmax(logits, -1, torch.float32, out=out)
    losses = -out.gather(1, labels[:, None]).squeeze(1)
    if not with_gradient:
        return losses, None
    minus_one = out.new_full((1, 1), -1.0).expand(len(labels), 1)
    return losses, out.exp_().scatter_add_(1, labels[:, None], minus_one)


def _compiled_softmax(logits: Tensor, labels: Tensor, wide: Wide, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Reads the logits twice and writes the gradient over them, once: a GPU's time for it is the time of its memory."""
    require_labels(labels, logits.size(1))  # compiled code takes -1 for the last class
    losses = _compiled()(logits, labels, with_gradient)
    return losses, logits if with_gradient else None


@cache
def _compiled() -> Callable[[Tensor, Tensor, bool], Tensor]:
    keep_compilations()
    return torch.compile(_softmax_over_logits, dynamic=True)


def _softmax_over_logits(logits: Tensor, labels: Tensor, with_gradient: bool) -> Tensor:
    precise = logits.float()
    normalizer = precise.logsumexp(1)
    losses = normalizer - precise.gather(1, labels[:, None]).squeeze(1)
    if with_gradient:
        is_label = torch.arange(logits.size(1), device=logits.device) == labels[:, None]
        logits.copy_((precise - normalizer[:, None]).exp() - is_label.float())
    return losses


def _liger_softmax(logits: Tensor, labels: Tensor, wide: Wide, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    # Its losses have the dtype of the logits, and its kernel writes the gradient over them.
    copied = wide(len(logits)).copy_(logits).detach().requires_grad_(with_gradient)
    plain = {"lse_square_scale": 0.0, "label_smoothing": 0.0, "softcap": None, "return_z_loss": False}
    losses = cross_entropy_forward(copied, labels, None, IGNORED, reduction="none", **plain)[0]
    return losses, copied.detach() if with_gradient else None


@dataclass(frozen=True)
class SoftmaxBackend(Backend):
    """A :data:`Softmax`."""

    buffer_bytes: int = torch.float32.itemsize  # per logit, of the buffer that it asks for


CROSS_ENTROPY = (
    SoftmaxBackend("compiled", _compiled_softmax, compiler_missing, automatic=("cuda",), buffer_bytes=0),
    SoftmaxBackend("torch", _torch_softmax),
    SoftmaxBackend("liger", _liger_softmax, liger_missing, automatic=()),
)


class _LinearCrossEntropy(torch.autograd.Function):
    """``kept``: which rows have a label; None: all."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        kept: Tensor | None,
        chunk_rows: int,
        loss: ChunkLoss,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        number, classes = labels.numel() if kept is None else kept.numel(), weight.size(0)
        step = min(number, chunk_rows)
        # Buffers for all chunks: fresh memory for each would cost as much time as the softmax.
        logits = hidden.new_empty(step, classes)
        wide = cache(lambda: torch.empty_like(logits, dtype=torch.float32))  # not all softmaxes need it
        grads = _LossGradients(hidden, weight, bias, [with_gradients and needed for needed in ctx.needs_input_grad[:3]])
        rows = hidden.new_zeros(labels.numel(), dtype=torch.float32)
        for start in range(0, number, max(1, step)):
            stop = min(start + step, number)
            at = slice(start, stop) if kept is None else kept[start:stop]
            h, x = hidden[at], logits[: stop - start]
            _linear(h, weight, bias, out=x)
            rows[at], grad = loss(x, at, lambda n: wide()[:n], grads.wanted)
            if grad is not None:
                grads.add(at, h, weight, grad if grad.dtype == x.dtype else x.copy_(grad))
        ctx.save_for_backward(*grads.finished())
        ctx.spent = False
        ctx.mark_non_differentiable(rows)
        return rows.sum(), rows

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative (create_graph=True); use the plain loss")
        if ctx.spent:
            raise RuntimeError("linear_cross_entropy can be differentiated only once; compute the loss again")
        # In place: another [classes, hidden] would be the largest tensor in memory.
        scaled = [None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors]
        ctx.spent = True
        return (*scaled, None, None, None, None, None)


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
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


def sharded_softmax(
    logits: Tensor, labels: Tensor, wide: Callable[[int], Tensor], with_gradient: bool, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses ``[n]`` of tokens, the same on every rank, and softmax minus one-hot of this rank's columns.

    ``logits`` are ``[n, classes of a rank]``; all ranks of ``group`` have equally many classes, in rank order.
    ``labels`` ``[n]`` int64 are indices over all ranks' classes, the same on every rank. ``wide``: n -> a buffer ``[n,
    classes of a rank]`` fp32, for the gradient. It needs one collective of two numbers per token and rank.
    """
    width, out = logits.size(1), wide(len(logits))
    require_labels(labels, group.size() * width)
    local_labels = labels - group.rank() * width
    is_local, column = (local_labels >= 0) & (local_labels < width), local_labels.clamp(0, width - 1)[:, None]
    top = logits.amax(1).float()
    torch.sub(logits, top[:, None], out=out).exp_()
    target = logits.gather(1, column).squeeze(1).float().masked_fill_(~is_local, 0.0)
    of_ranks = gathered(torch.stack([top + out.sum(1).log(), target]), group)
    normalizer, target = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)
    losses = normalizer - target
    if not with_gradient:
        return losses, None
    out.mul_((top - normalizer).exp_()[:, None])
    return losses, out.scatter_add_(1, column, -is_local.to(out.dtype)[:, None])


def require_labels(labels: Tensor, classes: int) -> None:
    """Raise a RuntimeError on the device, without waiting on the host, if a label is not in ``[0, classes)``."""
    assert_async(((labels >= 0) & (labels < classes)).all(), "a label is out of range")
