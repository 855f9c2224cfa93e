"""The divergence of a student from a teacher, from the hidden states of both, without computing all logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.ops.collectives import add_up_gradients, gathered
from omnitrain.ops.loss.linear import CHUNK_BYTES, LinearLoss, LossTerm, Wide, linear, of_rows, own_part

METRICS = ("agreement", "entropy", "teacher_entropy")

# Bytes of the logits of student and teacher in one chunk; on a CPU, those of 111 rows of 150k classes in fp32.
_CHUNK_BYTES = {"cpu": 2**27, "cuda": CHUNK_BYTES["cuda"]}
_BLOCK_BYTES = {"cpu": 2**22, "cuda": 2**26}  # of the logits that one pass over the classes reads, so caches hold them
_NEVER = -1e30  # logit of a class that one of both lacks: its probability is 0, and its logarithm stays finite


@dataclass(frozen=True)
class Divergence:
    """How a student's distribution ``q`` over the classes is compared with a teacher's ``p``.

    Attributes:
        kind: ``forward_kl``: sum of p log(p/q); ``reverse_kl``: sum of q log(q/p); ``jsd``: half of each, from (p+q)/2.
        temperature: divides the logits of both; the loss is multiplied by its square, so that gradients keep their size
            (Hinton et al., arXiv 1503.02531).
        top_k: compare the teacher's k most likely classes, and all others as one class; None: all classes.
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    temperature: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True)
class Taught:
    """What a teacher says of the rows of a student.

    Attributes:
        hidden: ``[N, width]``, its last hidden states, without gradient.
        weight: ``[classes of the student, width]``, its output layer; a DTensor where the student's is one.
        bias: ``[classes of the student]`` or None.
        classes: how many classes both have; those from there on take no part.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    classes: int


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    taught: Taught,
    how: Divergence,
    bias: Tensor | None = None,
    *,
    chunk_elements: int | None = None,
) -> LossTerm:
    """Compute the divergence of ``softmax(hidden @ weight.T + bias)`` from the teacher's, chunk by chunk.

    The forward computes the gradients, as :func:`~omnitrain.ops.loss.cross_entropy.linear_cross_entropy` does: four
    matmuls per chunk, and ``sum`` can be differentiated only once.

    Args:
        hidden: ``[N, hidden]``; each row counts.
        weight: ``[classes, hidden]``. The classes of a DTensor are evenly sharded over the ranks of its mesh, and so
            are those of the teacher's output layer; see :func:`linear_cross_entropy`.
        taught: the teacher's side of the same rows.
        how: which divergence.
        bias: ``[classes]`` or None.
        chunk_elements: the most logits of each model in memory at once; None: a value for the device.

    Returns:
        The loss in nats, with :data:`METRICS`: whether both predict the same class, and both entropies, in nats, at
        the temperature, over all shared classes. Without rows it is 0, and its gradients are zeros.

    Raises:
        RuntimeError: shapes or dtypes do not fit; in the backward: ``sum`` was differentiated before.
    """
    group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None  # ranks that share the classes
    own: Callable[[Any], Any] = own_part if group is not None else lambda tensor: tensor
    weight, bias, layer, layer_bias = own(weight), own(bias), own(taught.weight), own(taught.bias)
    states = taught.hidden.to(layer.dtype)
    if chunk_elements is None:
        chunk_elements = _CHUNK_BYTES[hidden.device.type] // (hidden.itemsize + states.itemsize)
    chunk_rows = max(1, chunk_elements // len(weight))
    ranks = _SharedClasses(group, len(weight), taught.classes)
    buffer = states.new_empty(min(len(states), chunk_rows), len(layer))
    block_rows = max(1, _BLOCK_BYTES[hidden.device.type] // (4 * len(weight)))
    found: list[Tensor] = []

    def run(logits: Tensor, at: slice | Tensor, _: Wide, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        of_teacher, losses = buffer[: len(logits)], []
        linear(states[at], layer, layer_bias, out=of_teacher)
        for student, teacher in zip(logits.split(block_rows), of_teacher.split(block_rows), strict=True):
            rows, gradient, metrics = _diverge(student, teacher, how, ranks, with_gradient)
            if gradient is not None:
                student.copy_(gradient)
            losses.append(rows)
            found.append(metrics)
        return torch.cat(losses), logits if with_gradient else None

    total, rows = LinearLoss.apply(hidden, weight, bias, None, chunk_rows, run, torch.is_grad_enabled())
    metrics = {name: of_rows([block[index] for block in found], rows, None) for index, name in enumerate(METRICS)}
    return LossTerm(total if group is None else add_up_gradients(total, group), len(rows), rows, metrics)


@dataclass(frozen=True)
class _SharedClasses:
    """The ranks that share the classes: ``width`` each, of which the first ``classes`` of all take part."""

    group: dist.ProcessGroup | None
    width: int
    classes: int

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def of_all(self, own: Tensor) -> Tensor:
        """``[ranks, ...]``."""
        return own[None] if self.group is None else gathered(own, self.group)

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        """A copy of a rank's logits ``[n, width]``, at least in fp32, at a temperature."""
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        precise[:, max(0, self.classes - self.rank * self.width) :] = _NEVER
        return precise


def _diverge(
    student: Tensor, teacher: Tensor, how: Divergence, ranks: _SharedClasses, with_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of logits ``[n, width]`` of a rank: losses ``[n]``, the student's gradient, and :data:`METRICS` ``[3, n]``."""
    q, p = (ranks.scaled(logits, how.temperature) for logits in (student, teacher))
    own = [torch.stack([*of.max(1), of.logsumexp(1)]) for of in (q, p)]  # a float holds the index of any class
    top, index, total = ranks.of_all(torch.stack(own)).unbind(2)  # each [ranks, 2, n]
    index = index + ranks.width * torch.arange(len(index), device=index.device)[:, None, None]
    predicted = index.gather(0, top.argmax(0, keepdim=True))[0]
    normalizer = total.logsumexp(0)[..., None]
    log_q, log_p = q.sub_(normalizer[0]), p.sub_(normalizer[1])
    probability = log_q.exp()
    entropies: Sequence[Tensor]
    sums = [-(probability * log_q).sum(1), -(log_p.exp() * log_p).sum(1)]
    point = _POINTS[how.kind]
    if how.top_k is not None and how.top_k < ranks.classes:
        losses, gradient = _of_top_classes(log_q, log_p, probability, how.top_k, point, ranks)
        entropies = ranks.of_all(torch.stack(sums)).sum(0).unbind()
    else:
        each, gradient = point(log_q, log_p)
        *entropies, losses, slope = ranks.of_all(torch.stack([*sums, each.sum(1), gradient.sum(1)])).sum(0).unbind()
        gradient = gradient.addcmul_(probability, slope[:, None], value=-1)
    scaled = gradient.mul_(how.temperature) if with_gradient else None
    metrics = torch.stack([(predicted[0] == predicted[1]).to(losses.dtype), *entropies])
    return losses * how.temperature**2, scaled, metrics


def _of_top_classes(
    log_q: Tensor, log_p: Tensor, probability: Tensor, k: int, point: _Point, ranks: _SharedClasses
) -> tuple[Tensor, Tensor]:
    """Losses and gradient over the teacher's ``k`` most likely classes, and all others as one."""
    own_p, at = log_p.topk(min(k, ranks.width))
    own_q = log_q.gather(1, at)
    of_all = ranks.of_all(torch.stack([own_q, own_p])).permute(1, 2, 0, 3).flatten(2)  # [2, n, ranks * k]
    chosen = of_all[1].topk(k).indices
    mask = torch.zeros_like(of_all[1], dtype=torch.bool).scatter_(1, chosen, True)
    own = mask.unflatten(1, (-1, at.size(1)))[:, ranks.rank]
    others = [x.scatter(1, at, y.masked_fill(own, _NEVER)).logsumexp(1) for x, y in ((log_q, own_q), (log_p, own_p))]
    rest = ranks.of_all(torch.stack(others)).logsumexp(0)
    q, p = (torch.cat([of_all[which].gather(1, chosen), rest[which, :, None]], 1) for which in (0, 1))
    each, slopes = point(q, p)
    slope = slopes.sum(1, keepdim=True)
    # A class of the rest moves it by its share of the rest.
    gradient = (log_q - rest[0, :, None]).exp_().mul_(slopes[:, -1:])
    gradient.scatter_(1, at, torch.where(own, point(own_q, own_p)[1], gradient.gather(1, at)))
    return each.sum(1), gradient.addcmul_(probability, slope, value=-1)


# log q and log p ``[n, classes]`` -> the loss of each class, and its derivative by log q if q need not add up to 1, but
# for a multiple of q, which cancels.
_Point = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _forward_kl(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return (log_p - log_q).mul_(p), p.neg_()


def _reverse_kl(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    each = (log_q - log_p).mul_(log_q.exp())
    return each, each


def _jsd(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    middle = torch.logaddexp(log_q, log_p).sub_(math.log(2))
    of_student = (log_q - middle).mul_(log_q.exp()).mul_(0.5)
    return (log_p - middle).mul_(log_p.exp()).mul_(0.5).add_(of_student), of_student


_POINTS: Mapping[str, _Point] = MappingProxyType({"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd})
