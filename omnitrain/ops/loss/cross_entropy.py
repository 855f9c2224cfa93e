"""Cross entropy as a sum, a count and one detached loss per row; with a linear head without computing all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.errors import UserError
from omnitrain.ops.collectives import add_up_gradients, gathered
from omnitrain.ops.compile.blocks import compiler_missing, keep_compilations
from omnitrain.ops.loss import token_functions
from omnitrain.ops.loss.linear import CHUNK_BYTES, LinearLoss, LossTerm, Wide, of_rows, own_part
from omnitrain.ops.registry import Backend, choose, liger_missing
from omnitrain.torch_private import assert_async

IGNORED = -100  # the label of a row without a loss

_BYTES_OF_OWN = 16  # per logit of a user's loss: a copy, what its backward keeps, the gradient, all in fp32

# Logits ``[n, classes]``, labels ``[n]``, a buffer, whether the gradient is wanted -> losses ``[n]`` fp32 and their
# gradient ``[n, classes]`` = softmax - one-hot, which may lie in the buffer or over the logits.
Softmax = Callable[[Tensor, Tensor, Wide, bool], tuple[Tensor, Tensor | None]]


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
        weight, bias = own_part(weight), own_part(bias)
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

    total, rows = LinearLoss.apply(hidden, weight, bias, kept, chunk_rows, run, torch.is_grad_enabled())
    values = {name: of_rows([chunk[name] for chunk in chunks], rows, kept) for name in metrics or {}}
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
