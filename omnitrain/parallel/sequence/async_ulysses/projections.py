"""Projections whose rows are exchanged for heads while the others are computed, forward and backward.

The operations are those of a projection, then an exchange (or the reverse), only in another order: rows go in chunks,
and what one chunk needs is on its way while another is computed. A linear layer computes each row by itself, so nothing
changes, not even in the last bit; gradients of weights are one product over all rows, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omnitrain.parallel.sequence.head_exchange import Arrival, HeadSpans, start_gather, start_scatter

# Chunks of a projection whose exchange nothing else hides, and the fewest rows of one: a matrix product of a few rows
# rounds differently.
MOST_CHUNKS = 4
FEWEST_ROWS = 16

# Some rows of each rank: (start, stop).
Rows = list[tuple[int, int]]


@dataclass(frozen=True)
class Projection:
    """A linear layer whose output features are heads side by side, and the norm behind it.

    Attributes:
        linear: the layer.
        spans: the heads of each rank.
        norm: normalises what it is given along the last dim.
        norm_forward: of ``norm``.
        norm_width: of what it is given.
        heads_first: lay its gradient out in memory by heads, not by rows.
    """

    linear: nn.Linear
    spans: HeadSpans
    norm: nn.Module | None = None
    norm_forward: Callable[[Tensor], Tensor] | None = None
    norm_width: int = 0
    heads_first: bool = False

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.linear.out_features // self.spans[-1][1]

    def normed(self, y: Tensor) -> Tensor:
        """``[n, features]`` behind the norm."""
        return y if self.norm_forward is None else self.in_parts(y).flatten(2)[0]

    def in_parts(self, y: Tensor) -> Tensor:
        """``[1, n, features / norm_width, norm_width]`` behind the norm."""
        assert self.norm_forward is not None
        return self.norm_forward(y.view(1, len(y), -1, self.norm_width))

    @property
    def parameters(self) -> list[Tensor]:
        """Weight, bias if any, and those of the norm."""
        linear = [self.linear.weight, *([] if self.linear.bias is None else [self.linear.bias])]
        return [*linear, *(() if self.norm is None else self.norm.parameters())]


@dataclass(frozen=True, eq=False)
class RowExchange:
    """The ranks that exchange rows for heads.

    Attributes:
        rows: of each rank.
        group: of the ranks.
    """

    rows: Sequence[int]
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's place."""
        return dist.get_rank(self.group)

    @property
    def num_chunks(self) -> int:
        """The same on all ranks."""
        return max(1, min(MOST_CHUNKS, min(self.rows) // FEWEST_ROWS))

    def chunks(self, number: int) -> list[Rows]:
        """``number`` runs of each rank's rows, nearly equal: per run, ``(start, stop)`` on each rank."""
        cuts = [[rows * index // number for index in range(number + 1)] for rows in self.rows]
        return [list(run) for run in zip(*(pairwise(of_rank) for of_rank in cuts), strict=True)]

    def places(self, run: Rows) -> list[slice]:
        """Where each rank's rows of a run are in the whole row."""
        starts = [0, *accumulate(self.rows)]
        return [slice(first + start, first + stop) for first, (start, stop) in zip(starts, run, strict=False)]

    def start_gather(self, x_NHW: Tensor, spans: HeadSpans, run: Rows) -> Arrival:
        """This rank's rows of a run, all heads; all ranks' rows of it, own heads, arrive."""
        return start_gather([x_NHW], [spans], [stop - start for start, stop in run], self.group)

    def start_scatter(self, x_THW: Tensor, spans: HeadSpans, run: Rows) -> Arrival:
        """The whole row, own heads; this rank's rows of a run, all heads, arrive."""
        rows = torch.cat([x_THW[place] for place in self.places(run)])
        return start_scatter([rows], [spans], [stop - start for start, stop in run], self.group)


def project_and_gather(x: Tensor, projections: Sequence[Projection], exchange: RowExchange) -> tuple[Tensor, ...]:
    """Projections of this rank's rows, and in exchange the whole row of its heads.

    Args:
        x: ``[own rows, features]``.
        projections: in the order in which they are computed; a projection's exchange is hidden behind the next ones.
        exchange: the ranks.

    Returns:
        Per projection ``[all rows, features of the own heads]``, behind its norm.
    """
    parameters = [p for projection in projections for p in projection.parameters]
    return _ProjectAndGather.apply(projections, exchange, x, *parameters)


def scatter_and_project(x: Tensor, projection: Projection, exchange: RowExchange) -> Tensor:
    """The whole row of this rank's heads exchanged for its own rows of all heads, and their projection.

    Args:
        x: ``[all rows, features of the own heads]``.
        projection: its *input* features are heads side by side.
        exchange: the ranks.

    Returns:
        ``[own rows, output features]``.
    """
    return _ScatterAndProject.apply(projection.spans, exchange, x, *projection.parameters)


class _ProjectAndGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projections: Sequence[Projection], exchange: RowExchange, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        arriving: list[list[tuple[Rows, Arrival]]] = []
        before_norm: list[Tensor] = []
        for index, projection in enumerate(projections):
            # The others are computed while the one before is on its way.
            is_at_an_end = index in (0, len(projections) - 1)
            arriving.append([])
            made: list[Tensor] = []
            for run in exchange.chunks(exchange.num_chunks if is_at_an_end else 1):
                made.append(F.linear(x[slice(*run[exchange.rank])], projection.linear.weight, projection.linear.bias))
                heads = projection.normed(made[-1]).unflatten(1, (-1, projection.head_width))
                arriving[-1].append((run, exchange.start_gather(heads, projection.spans, run)))
            if projection.norm is not None:
                before_norm.append(_concatenated(made))
        ctx.projections, ctx.exchange = projections, exchange
        ctx.save_for_backward(x, *before_norm, *parameters)
        return tuple(_whole_row(runs, exchange) for runs in arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        projections: Sequence[Projection] = ctx.projections
        exchange: RowExchange = ctx.exchange
        x, *saved = ctx.saved_tensors
        before_norm = [None if projection.norm is None else saved.pop(0) for projection in projections]
        parameters = [[saved.pop(0) for _ in projection.parameters] for projection in projections]
        # Autograd adds gradients of a shared input in the reverse order of its uses.
        order = range(len(projections))[::-1]
        arriving = {
            index: _start_back(gradients[index], projections[index], exchange, is_first=index == order[0])
            for index in order
        }
        of_x: Tensor | None = None
        of_parameters: dict[int, list[Tensor | None]] = {}
        for index in order:
            backward = _LinearBackward(projections[index], parameters[index], before_norm[index])
            own = _concatenated([backward.rows(arrived()[0].flatten(1)) for arrived in arriving[index]])
            of_x = own if of_x is None else of_x + own
            of_parameters[index] = backward.parameters(x)
        return None, None, of_x, *(found for index in range(len(projections)) for found in of_parameters[index])


class _LinearBackward:
    """Gradients of a projection: of its input chunk by chunk, of its parameters from all rows at once."""

    def __init__(self, projection: Projection, parameters: list[Tensor], before_norm: Tensor | None) -> None:
        self._projection, self._before_norm = projection, before_norm
        self._weight, *self._bias = parameters[: 1 if projection.linear.bias is None else 2]
        self._gradients: list[Tensor] = []
        self._of_norm: list[Tensor | None] = []

    def rows(self, gradient: Tensor) -> Tensor:
        """Of the input, for ``gradient`` ``[rows, features]`` of some rows of the output."""
        if self._before_norm is not None:
            gradient = self._through_norm(self._before_norm, gradient)
        self._gradients.append(gradient)
        return gradient.mm(self._weight)

    def parameters(self, x: Tensor) -> list[Tensor | None]:
        """Of weight, bias and the norm's parameters; None: of what is frozen."""
        return [*_of_linear(_concatenated(self._gradients), x, self._weight, *self._bias), *self._of_norm]

    def _through_norm(self, before_norm: Tensor, gradient: Tensor) -> Tensor:
        assert self._projection.norm is not None
        own = list(self._projection.norm.parameters())
        with torch.enable_grad():
            y = before_norm.detach().requires_grad_()
            trained = [p for p in own if p.requires_grad]
            parts = self._projection.in_parts(y)
            of_parts = gradient.view(parts.shape)
            if self._projection.heads_first:
                of_parts = of_parts.transpose(1, 2).contiguous().transpose(1, 2)
            of_y, *of_trained = torch.autograd.grad(parts, [y, *trained], of_parts)
        self._of_norm = [of_trained.pop(0) if p.requires_grad else None for p in own]
        return of_y


def _of_linear(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor | None]:
    """Of weight and bias, from all rows at once."""
    of_weight = gradient.t().mm(x) if weight.requires_grad else None
    return [of_weight, *([] if bias is None else [gradient.sum(0) if bias.requires_grad else None])]


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _start_back(gradient: Tensor, projection: Projection, exchange: RowExchange, is_first: bool) -> list[Arrival]:
    """Gradients of the own rows of all heads, on their way; in one chunk where a norm needs all rows at once."""
    heads = gradient.unflatten(1, (-1, projection.head_width))
    runs = exchange.chunks(exchange.num_chunks if is_first and projection.norm is None else 1)
    return [exchange.start_scatter(heads, projection.spans, run) for run in runs]


def _whole_row(arriving: Sequence[tuple[Rows, Arrival]], exchange: RowExchange) -> Tensor:
    """``[all rows, features of own heads]`` from the rows of all ranks, run by run."""
    parts = [arrived()[0].flatten(1) for _, arrived in arriving]
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(exchange.rows), parts[0].size(1))
    for (run, _), part in zip(arriving, parts, strict=True):
        for place, rows in zip(exchange.places(run), part.split([stop - start for start, stop in run]), strict=True):
            whole[place] = rows
    return whole


class _ScatterAndProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spans: HeadSpans, exchange: RowExchange, x: Tensor, *parameters: Tensor) -> Tensor:
        start, stop = spans[exchange.rank]
        heads = x.unflatten(1, (stop - start, -1))
        arriving = [exchange.start_scatter(heads, spans, run) for run in exchange.chunks(exchange.num_chunks)]
        rows: list[Tensor] = []
        outputs: list[Tensor] = []
        for arrived in arriving:
            rows.append(arrived()[0].flatten(1))
            outputs.append(F.linear(rows[-1], *parameters))
        ctx.spans, ctx.exchange = spans, exchange
        ctx.save_for_backward(_concatenated(rows), *parameters)
        return _concatenated(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange: RowExchange = ctx.exchange
        rows, weight, *bias = ctx.saved_tensors
        arriving = []
        for run in exchange.chunks(exchange.num_chunks):
            heads = gradient[slice(*run[exchange.rank])].mm(weight).unflatten(1, (ctx.spans[-1][1], -1))
            arriving.append((run, exchange.start_gather(heads, ctx.spans, run)))
        of_parameters = _of_linear(gradient, rows, weight, *bias)
        return None, None, _whole_row(arriving, exchange), *of_parameters
