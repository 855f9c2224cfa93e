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

from omnitrain.parallel.head_exchange import Arrival, HeadSpans, start_gather, start_scatter

# Chunks of a projection that nothing else could hide, and the fewest rows of one: a product with one row has other bits.
MOST_CHUNKS = 4
FEWEST_ROWS = 16


@dataclass(frozen=True)
class Projection:
    """A linear layer whose output features are heads side by side, and the norm behind it.

    Attributes:
        linear: the layer; its parameters are read when it is used.
        spans: the heads of each rank.
        norm: of each row, by itself, of the output as ``[..., norm_width]``; None: none.
        norm_width: of what the norm is given.
    """

    linear: nn.Linear
    spans: HeadSpans
    norm: Callable[[Tensor], Tensor] | None = None
    norm_width: int = 0
    norm_parameters: tuple[nn.Parameter, ...] = ()

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.linear.out_features // self.spans[-1][1]

    def normed(self, y: Tensor) -> Tensor:
        """``[n, features]`` behind the norm."""
        if self.norm is None:
            return y
        return self.norm(y.view(1, len(y), -1, self.norm_width)).reshape(len(y), -1)


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

    def chunks(self, number: int) -> list[list[tuple[int, int]]]:
        """``number`` runs of each rank's rows, nearly equal: per run, ``(start, stop)`` on each rank."""
        cuts = [[rows * index // number for index in range(number + 1)] for rows in self.rows]
        return [list(run) for run in zip(*(pairwise(of_rank) for of_rank in cuts), strict=True)]

    def places(self, run: Sequence[tuple[int, int]]) -> list[slice]:
        """Where each rank's rows of a run are in the whole row."""
        starts = [0, *accumulate(self.rows)]
        return [slice(first + start, first + stop) for first, (start, stop) in zip(starts, run, strict=False)]

    def start_gather(self, x_NHW: Tensor, spans: HeadSpans, run: Sequence[tuple[int, int]]) -> Arrival:
        """This rank's rows of a run, all heads; all ranks' rows of it, own heads, arrive."""
        return start_gather([x_NHW], [spans], [stop - start for start, stop in run], self.group)

    def start_scatter(self, x_THW: Tensor, spans: HeadSpans, run: Sequence[tuple[int, int]]) -> Arrival:
        """The whole row, own heads; this rank's rows of a run, all heads, arrive."""
        rows = torch.cat([x_THW[place] for place in self.places(run)])
        return start_scatter([rows], [spans], [stop - start for start, stop in run], self.group)


def project_and_gather(
    x: Tensor, projections: Sequence[Projection], exchange: RowExchange
) -> tuple[Tensor, ...]:
    """Projections of this rank's rows, and in exchange the whole row of its heads.

    Args:
        x: ``[own rows, features]``.
        projections: in the order in which they are computed; a projection's exchange is hidden behind the next ones.
        exchange: the ranks.

    Returns:
        Per projection ``[all rows, features of the own heads]``, behind its norm.
    """
    parameters = [p for projection in projections for p in _parameters(projection)]
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
    return _ScatterAndProject.apply(projection.linear, projection.spans, exchange, x, *_parameters(projection))


def _parameters(projection: Projection) -> list[Tensor]:
    linear = projection.linear
    return [linear.weight, *([] if linear.bias is None else [linear.bias]), *projection.norm_parameters]


class _ProjectAndGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projections: Sequence[Projection], exchange: RowExchange, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        arrivals: list[tuple[list[tuple[int, int]], Arrival]] = []
        before_norm: list[Tensor] = []
        outputs: list[list[tuple[list[tuple[int, int]], Arrival]]] = []
        for index, projection in enumerate(projections):
            is_at_an_end = index in (0, len(projections) - 1)
            arrivals, made = [], []
            for run in exchange.chunks(exchange.num_chunks if is_at_an_end else 1):
                y = F.linear(x[slice(*run[exchange.rank])], projection.linear.weight, projection.linear.bias)
                made.append(y)
                heads = projection.normed(y).unflatten(1, (-1, projection.head_width))
                arrivals.append((run, exchange.start_gather(heads, projection.spans, run)))
            outputs.append(arrivals)
            if projection.norm is not None:
                before_norm.append(made[0] if len(made) == 1 else torch.cat(made))
        ctx.projections, ctx.exchange = projections, exchange
        ctx.save_for_backward(x, *before_norm, *parameters)
        return tuple(_whole_row(arrived, exchange) for arrived in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        projections: Sequence[Projection] = ctx.projections
        exchange: RowExchange = ctx.exchange
        x, *saved = ctx.saved_tensors
        normed = [projection for projection in projections if projection.norm is not None]
        before_norm = dict(zip(map(id, normed), saved, strict=False))
        arrivals = [
            _start_back(gradient, projection, exchange, exchange.num_chunks if index == 0 else 1)
            for index, (projection, gradient) in enumerate(
                zip(reversed(projections), reversed(gradients), strict=True)
            )
        ]
        of_x: Tensor | None = None
        of_parameters: list[Tensor | None] = []
        # Autograd adds gradients of a shared input in the reverse order of its uses.
        for projection, arriving in zip(reversed(projections), arrivals, strict=True):
            backward = _LinearBackward(projection, before_norm.get(id(projection)))
            rows_of_x = [backward.rows(arrived()[0].flatten(1)) for arrived in arriving]
            own = rows_of_x[0] if len(rows_of_x) == 1 else torch.cat(rows_of_x)
            of_x = own if of_x is None else of_x + own
            of_parameters = [*backward.parameters(x), *of_parameters]
        return None, None, of_x, *of_parameters


class _LinearBackward:
    """Gradients of a projection: of its input chunk by chunk, of its parameters from all rows at once."""

    def __init__(self, projection: Projection, before_norm: Tensor | None) -> None:
        self._projection = projection
        self._before_norm = before_norm
        self._gradients: list[Tensor] = []
        self._of_norm: list[Tensor | None] = []

    def rows(self, gradient: Tensor) -> Tensor:
        """Of the input, for ``gradient`` ``[rows, features]`` of some rows of the output."""
        if self._before_norm is not None:
            gradient = self._through_norm(gradient)
        self._gradients.append(gradient)
        return gradient.mm(self._projection.linear.weight)

    def parameters(self, x: Tensor) -> list[Tensor | None]:
        """Of weight, bias and the norm's parameters."""
        gradient = self._gradients[0] if len(self._gradients) == 1 else torch.cat(self._gradients)
        linear = self._projection.linear
        weight = gradient.t().mm(x) if linear.weight.requires_grad else None
        bias = [] if linear.bias is None else [gradient.sum(0) if linear.bias.requires_grad else None]
        return [weight, *bias, *self._of_norm]

    def _through_norm(self, gradient: Tensor) -> Tensor:
        assert self._before_norm is not None
        trained = [p for p in self._projection.norm_parameters if p.requires_grad]
        with torch.enable_grad():
            y = self._before_norm.detach().requires_grad_()
            found = torch.autograd.grad(self._projection.normed(y), [y, *trained], gradient)
        of_trained = iter(found[1:])
        self._of_norm = [next(of_trained) if p.requires_grad else None for p in self._projection.norm_parameters]
        return found[0]


def _start_back(gradient: Tensor, projection: Projection, exchange: RowExchange, num_chunks: int) -> list[Arrival]:
    """Gradients of the own rows of all heads, on their way; in one chunk where a norm needs all rows at once."""
    heads = gradient.unflatten(1, (-1, projection.head_width))
    runs = exchange.chunks(1 if projection.norm is not None else num_chunks)
    return [exchange.start_scatter(heads, projection.spans, run) for run in runs]


def _whole_row(arriving: Sequence[tuple[list[tuple[int, int]], Arrival]], exchange: RowExchange) -> Tensor:
    """``[all rows, features of own heads]`` from the rows of all ranks, run by run."""
    whole: Tensor | None = None
    for run, arrived in arriving:
        rows = arrived()[0].flatten(1)
        if len(arriving) == 1:
            return rows
        whole = rows.new_empty(sum(exchange.rows), rows.size(1)) if whole is None else whole
        for place, part in zip(
            exchange.places(run), rows.split([stop - start for start, stop in run]), strict=True
        ):
            whole[place] = part
    assert whole is not None
    return whole


class _ScatterAndProject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, linear: nn.Linear, spans: HeadSpans, exchange: RowExchange, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        heads = x.unflatten(1, (spans[exchange.rank][1] - spans[exchange.rank][0], -1))
        arriving = [exchange.start_scatter(heads, spans, run) for run in exchange.chunks(exchange.num_chunks)]
        rows, outputs = [], []
        for arrived in arriving:
            rows.append(arrived()[0].flatten(1))
            outputs.append(F.linear(rows[-1], linear.weight, linear.bias))
        ctx.linear, ctx.spans, ctx.exchange = linear, spans, exchange
        ctx.save_for_backward(rows[0] if len(rows) == 1 else torch.cat(rows), *parameters)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear: nn.Linear = ctx.linear
        exchange: RowExchange = ctx.exchange
        (rows, *_) = ctx.saved_tensors
        arriving = []
        for run in exchange.chunks(exchange.num_chunks):
            of_rows = gradient[slice(*run[exchange.rank])].mm(linear.weight)
            heads = of_rows.unflatten(1, (ctx.spans[-1][1], -1))
            arriving.append((run, exchange.start_gather(heads, ctx.spans, run)))
        weight = gradient.t().mm(rows) if linear.weight.requires_grad else None
        bias = [] if linear.bias is None else [gradient.sum(0) if linear.bias.requires_grad else None]
        return None, None, None, _whole_row(arriving, exchange), weight, *bias
