"""The one experts function that is registered with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from omnitrain.ops.delayed_wgrad import WeightGradients
from omnitrain.ops.experts.choose import chosen
from omnitrain.ops.experts.grouped_mm import ProductMemory
from omnitrain.ops.experts.permute import TokenPermutation, combine_rows, sort_by_expert, take_rows
from omnitrain.ops.experts.routing_tape import cached_for_recompute
from omnitrain.ops.experts.timing import NOT_RECORDED, LayerSpans
from omnitrain.ops.experts.weights import ExpertRange, ExpertWeights, num_experts_of

SETTINGS = "_expert_settings"


class DispatchHandle(Protocol):
    """The rows of one forward of a layer, and of its backward: to their experts, in chunks of these, and back.

    Attributes:
        ranges: of the chunks in which this rank's experts are asked, in order; each once.
    """

    ranges: Sequence[Sequence[ExpertRange]]

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Rows ``[R, H]`` sorted by the experts of the chunk, and ``[E]`` int32 ends of each expert's."""
        ...

    def return_chunk(self, chunk: int, results: Tensor) -> None:
        """Results ``[R, H]`` of these rows."""
        ...

    def combine(self) -> Tensor:
        """The weighted sums ``[T, H]`` of the results."""
        ...


class Dispatcher(Protocol):
    """Brings rows to the ranks of their experts, and results back.

    Attributes:
        bytes_sent: in forwards, to other ranks.
    """

    bytes_sent: int

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> Any:
        """Who sends what to whom, from the experts ``[T, k]`` of this rank's tokens; once per layer and forward."""
        ...

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: Any, spans: LayerSpans) -> DispatchHandle:
        """Send a row of each of the tokens ``[T, H]`` to each of its experts. All of a journey is differentiable.

        The weights ``[T, k]`` are for the sums that come back.
        """
        ...


class _LocalDispatcher:
    """All experts are on this rank."""

    bytes_sent = 0

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> TokenPermutation:
        return sort_by_expert(top_k_index, num_experts)

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: TokenPermutation, spans: LayerSpans) -> _LocalDispatch:
        return _LocalDispatch(tokens, weights, plan)


class _LocalDispatch:
    """Rows that are where their experts are."""

    def __init__(self, tokens: Tensor, weights: Tensor, routes: TokenPermutation) -> None:
        self.ranges: Sequence[Sequence[ExpertRange]] = [[ExpertRange(0, len(routes.ends), 0, len(routes.token_of_row))]]
        self._rows, self._weights, self._routes = take_rows(tokens, routes), weights, routes

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        return self._rows, self._routes.ends

    def return_chunk(self, chunk: int, results: Tensor) -> None:
        self._rows = results

    def combine(self) -> Tensor:
        return combine_rows(self._rows, self._weights, self._routes)


@dataclass(frozen=True)
class ExpertSettings:
    """How the experts of a layer are computed.

    Attributes:
        dispatcher: brings rows to them; where it does to other ranks, the weights are a part of them on each rank.
        row_budget: see :class:`omnitrain.ops.experts.grouped_mm.ProductMemory`.
        recomputes_activation: see there.
        saving: a context for the products of the rows it is given, such as one that offloads what they save of these.
        delays_weight_gradients: compute those of the matrices last, while rows' gradients are on their way.
        meanwhile: computes something else of the layer while its last results are on their way.
        spans: told what happens when.
    """

    dispatcher: Dispatcher
    row_budget: int | None = None
    recomputes_activation: bool = False
    saving: Callable[[Tensor], AbstractContextManager[None]] | None = None
    delays_weight_gradients: bool = False
    overlap_with: Callable[[LayerSpans], None] | None = None
    spans: LayerSpans = NOT_RECORDED


def settings_of(module: nn.Module) -> ExpertSettings:
    """How the experts ``module`` are computed."""
    return getattr(module, SETTINGS, _AS_THEY_ARE)


_AS_THEY_ARE = ExpertSettings(_LocalDispatcher())


def bytes_sent(module: nn.Module) -> int:
    """What the experts ``module`` has sent to other ranks in forwards since this was asked last."""
    dispatcher = settings_of(module).dispatcher
    sent = dispatcher.bytes_sent
    if sent:
        dispatcher.bytes_sent = 0
    return sent


@torch.compiler.disable  # rows per expert are values: a traced call would be compiled again for each routing
def omnitrain_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, backend: str
) -> Tensor:
    """In transformers' ``ExpertsInterface``: the weighted sum of each token's experts.

    Args:
        module: the experts of a layer.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, k]``, experts by their numbers in the whole layer.
        top_k_weights: ``[T, k]``.
        backend: of the products, or ``auto``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.
    """
    settings = settings_of(module)
    spans = settings.spans
    plan = cached_for_recompute(lambda: settings.dispatcher.plan(top_k_index, num_experts_of(module), spans))
    memory = ProductMemory(settings.row_budget, settings.recomputes_activation)
    compute = chosen(module, hidden_states, backend).run
    # A backward does last what a forward did first: delayed gradients are computed before the first rows' are awaited.
    handle = settings.dispatcher.dispatch(hidden_states, top_k_weights, plan, spans)
    work = WeightGradients(spans.weight_gradients) if settings.delays_weight_gradients else None
    for chunk, experts in enumerate(ExpertWeights.of(module).in_chunks(handle.ranges, work)):
        rows, ends = handle.wait_chunk(chunk)
        with settings.saving(rows) if settings.saving is not None else nullcontext():
            results = spans.experts(chunk, rows, partial(compute, experts, rows, ends, memory))
        handle.return_chunk(chunk, results)
    if settings.overlap_with is not None:
        settings.overlap_with(spans)
    return handle.combine()
