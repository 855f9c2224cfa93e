"""Overlap the all-to-alls of projections with the computation of other projections, in forward and backward.

The operations are the same as projection, then exchange (or the reverse), in another order: tokens are divided into
chunks, and the exchange of one chunk overlaps with the computation of another. A linear layer computes each token
independently, so no bit changes; weight gradients remain one product over all tokens.
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

# The first or last projection's exchange has no other projection to overlap with, so it is divided into chunks. Chunks
# have a minimum size, because a matrix product of few rows rounds differently.
MOST_CHUNKS = 4
FEWEST_TOKENS = 16

# Some tokens of each rank: (start, stop).
TokenSpans = list[tuple[int, int]]


@dataclass(frozen=True)
class Projection:
    """A linear layer whose output features are concatenated heads, with the norm after it, if any."""

    linear: nn.Linear  # the linear layer
    spans: HeadSpans  # the heads of each rank
    norm: nn.Module | None = None  # after the linear layer; None: no norm
    norm_forward: Callable[[Tensor], Tensor] | None = None  # its forward
    norm_width: int = 0  # last dim of its input
    heads_first: bool = False  # whether the memory of its gradient is heads-first, instead of tokens-first

    @property
    def head_width(self) -> int:
        """The number of features of a head."""
        return self.linear.out_features // self.spans[-1][1]

    def normed(self, y: Tensor) -> Tensor:
        """Apply the norm, if any: ``[n, features]``."""
        return y if self.norm_forward is None else self.in_parts(y).flatten(2)[0]

    def in_parts(self, y: Tensor) -> Tensor:
        """Apply the norm: ``[1, n, features / norm_width, norm_width]``."""
        assert self.norm_forward is not None
        return self.norm_forward(y.view(1, len(y), -1, self.norm_width))

    @property
    def parameters(self) -> list[Tensor]:
        """Weight, bias if any, and the parameters of the norm."""
        linear = [self.linear.weight, *([] if self.linear.bias is None else [self.linear.bias])]
        return [*linear, *(() if self.norm is None else self.norm.parameters())]


@dataclass(frozen=True, eq=False)
class TokenExchange:
    """The ranks of ``group`` that exchange tokens for heads, with ``lengths`` tokens each."""

    lengths: Sequence[int]
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """The rank of this process in ``group``."""
        return dist.get_rank(self.group)

    @property
    def num_chunks(self) -> int:
        """The number of chunks, the same on all ranks."""
        return max(1, min(MOST_CHUNKS, min(self.lengths) // FEWEST_TOKENS))

    def chunks(self, number: int) -> list[TokenSpans]:
        """Divide each rank's tokens into ``number`` nearly equal chunks: per chunk, ``(start, stop)`` on each rank."""
        cuts = [[length * index // number for index in range(number + 1)] for length in self.lengths]
        return [list(run) for run in zip(*(pairwise(of_rank) for of_rank in cuts), strict=True)]

    def places(self, run: TokenSpans) -> list[slice]:
        """Return the positions of each rank's tokens of a chunk in the whole sequence."""
        starts = [0, *accumulate(self.lengths)]
        return [slice(first + start, first + stop) for first, (start, stop) in zip(starts, run, strict=False)]

    def start_gather(self, x_NHW: Tensor, spans: HeadSpans, run: TokenSpans) -> Arrival:
        """Send this rank's tokens of a chunk with all heads; receive all ranks' tokens of it with local heads."""
        return start_gather([x_NHW], [spans], [stop - start for start, stop in run], self.group)

    def start_scatter(self, x_THW: Tensor, spans: HeadSpans, run: TokenSpans) -> Arrival:
        """Send the whole sequence with local heads; receive this rank's tokens of a chunk with all heads."""
        tokens = torch.cat([x_THW[place] for place in self.places(run)])
        return start_scatter([tokens], [spans], [stop - start for start, stop in run], self.group)


def project_and_gather(x: Tensor, projections: Sequence[Projection], exchange: TokenExchange) -> tuple[Tensor, ...]:
    """Project this rank's tokens ``[local tokens, features]``, and exchange them for the whole sequence of its heads.

    An exchange overlaps with the next projections, in order. Returns per projection ``[all tokens, features of the
    local heads]``, after its norm.
    """
    parameters = [p for projection in projections for p in projection.parameters]
    return _ProjectAndGather.apply(projections, exchange, x, *parameters)


def scatter_and_project(x: Tensor, projection: Projection, exchange: TokenExchange) -> Tensor:
    """Exchange ``[all tokens, features of local heads]`` for ``[local tokens, all heads]``, and project those."""
    return _ScatterAndProject.apply(projection.spans, exchange, x, *projection.parameters)


class _ProjectAndGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projections: Sequence[Projection], exchange: TokenExchange, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        arriving: list[list[tuple[TokenSpans, Arrival]]] = []
        before_norm: list[Tensor] = []
        for index, projection in enumerate(projections):
            # Later projections compute while the exchange of the one before is in flight.
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
        return tuple(_whole_sequence(runs, exchange) for runs in arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        projections: Sequence[Projection] = ctx.projections
        exchange: TokenExchange = ctx.exchange
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
            own = _concatenated([backward.of_input(arrived()[0].flatten(1)) for arrived in arriving[index]])
            of_x = own if of_x is None else of_x + own
            of_parameters[index] = backward.parameters(x)
        return None, None, of_x, *(found for index in range(len(projections)) for found in of_parameters[index])


class _LinearBackward:
    """The gradients of a projection: of its input per chunk, of its parameters from all tokens at once."""

    def __init__(self, projection: Projection, parameters: list[Tensor], before_norm: Tensor | None) -> None:
        self._projection, self._before_norm = projection, before_norm
        self._weight, *self._bias = parameters[: 1 if projection.linear.bias is None else 2]
        self._gradients: list[Tensor] = []
        self._of_norm: list[Tensor | None] = []

    def of_input(self, gradient: Tensor) -> Tensor:
        """The gradient of some input tokens, from ``gradient`` ``[tokens, features]`` of the output."""
        if self._before_norm is not None:
            gradient = self._through_norm(self._before_norm, gradient)
        self._gradients.append(gradient)
        return gradient.mm(self._weight)

    def parameters(self, x: Tensor) -> list[Tensor | None]:
        """The gradients of weight, bias and the norm's parameters; None for frozen ones."""
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
    """The gradients of weight and bias, from all tokens at once."""
    of_weight = gradient.t().mm(x) if weight.requires_grad else None
    return [of_weight, *([] if bias is None else [gradient.sum(0) if bias.requires_grad else None])]


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _start_back(gradient: Tensor, projection: Projection, exchange: TokenExchange, is_first: bool) -> list[Arrival]:
    """Start the exchange of gradients back to local tokens; one chunk if a norm needs all tokens at once."""
    heads = gradient.unflatten(1, (-1, projection.head_width))
    runs = exchange.chunks(exchange.num_chunks if is_first and projection.norm is None else 1)
    return [exchange.start_scatter(heads, projection.spans, run) for run in runs]


def _whole_sequence(arriving: Sequence[tuple[TokenSpans, Arrival]], exchange: TokenExchange) -> Tensor:
    """``[all tokens, features of local heads]`` from the chunks of all ranks."""
    parts = [arrived()[0].flatten(1) for _, arrived in arriving]
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(exchange.lengths), parts[0].size(1))
    for (run, _), part in zip(arriving, parts, strict=True):
        for place, tokens in zip(exchange.places(run), part.split([stop - start for start, stop in run]), strict=True):
            whole[place] = tokens
    return whole


class _ScatterAndProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spans: HeadSpans, exchange: TokenExchange, x: Tensor, *parameters: Tensor) -> Tensor:
        start, stop = spans[exchange.rank]
        heads = x.unflatten(1, (stop - start, -1))
        arriving = [exchange.start_scatter(heads, spans, run) for run in exchange.chunks(exchange.num_chunks)]
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for arrived in arriving:
            inputs.append(arrived()[0].flatten(1))
            outputs.append(F.linear(inputs[-1], *parameters))
        ctx.spans, ctx.exchange = spans, exchange
        ctx.save_for_backward(_concatenated(inputs), *parameters)
        return _concatenated(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange: TokenExchange = ctx.exchange
        inputs, weight, *bias = ctx.saved_tensors
        arriving = []
        for run in exchange.chunks(exchange.num_chunks):
            heads = gradient[slice(*run[exchange.rank])].mm(weight).unflatten(1, (ctx.spans[-1][1], -1))
            arriving.append((run, exchange.start_gather(heads, ctx.spans, run)))
        of_parameters = _of_linear(gradient, inputs, weight, *bias)
        return None, None, _whole_sequence(arriving, exchange), *of_parameters
