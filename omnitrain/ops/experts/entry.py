"""The experts function that omnitrain registers with transformers, and the choice of its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from omnitrain.errors import UserError
from omnitrain.ops.delayed_wgrad import WeightGradients, delayed_to
from omnitrain.ops.experts.grouped_mm import ProductMemory, grouped_experts
from omnitrain.ops.experts.permute import TokenPermutation, combine_rows, counts_of, sort_by_expert, take_rows
from omnitrain.ops.experts.routing_tape import cached_for_recompute
from omnitrain.ops.experts.timing import NOT_RECORDED, LayerSpans
from omnitrain.ops.experts.weights import ExpertRange, ExpertWeights, num_experts_of
from omnitrain.ops.registry import Backend, choose

AUTO = "auto"


def _by_transformers(name: str, experts: ExpertWeights, rows: Tensor, ends: Tensor, memory: ProductMemory) -> Tensor:
    """Run a function that transformers registers; each row has one expert with weight 1."""
    if experts.first_adapter or experts.down_adapter:
        raise UserError(f"experts backend {name!r} does not support LoRA adapters; use torch")
    if memory != ProductMemory():
        raise UserError(f"experts backend {name!r} does not support a row budget or recompute; use torch")
    if rows.size(0) == 0:  # some backends fail without rows
        return grouped_experts(experts, rows, ends, memory)
    of_row = torch.repeat_interleave(counts_of(ends), output_size=rows.size(0)).unsqueeze(-1)
    function = ALL_EXPERTS_FUNCTIONS[name]
    return function(experts, rows, of_row, rows.new_ones(of_row.shape))


def _cuda_only(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"runs only on CUDA, not on {device.type}"


EXPERTS = (
    Backend("torch", grouped_experts),
    Backend("grouped_mm", partial(_by_transformers, "grouped_mm"), automatic=()),
    Backend("batched_mm", partial(_by_transformers, "batched_mm"), automatic=()),
    Backend("sonicmoe", partial(_by_transformers, "sonicmoe"), _cuda_only, automatic=()),
    Backend("deepgemm", partial(_by_transformers, "deepgemm"), _cuda_only, automatic=()),
)
"""``torch`` is omnitrain's function; the other names are transformers'."""

_chosen: dict[tuple[Any, ...], Backend] = {}


def chosen(module: nn.Module, rows: Tensor, asked: str) -> Backend:
    """Return the backend named ``asked`` for ``module`` on ``rows``; a UserError names those that can run there."""
    key = (type(module).__name__, asked, rows.device.type, rows.dtype)
    if key not in _chosen:
        _chosen[key] = choose("experts", EXPERTS, asked, rows.device)
    return _chosen[key]


SETTINGS = "_expert_settings"


class DispatchHandle(Protocol):
    """The rows of one forward of a layer, and of its backward: they go to their experts in chunks, and back."""

    @property
    def ranges(self) -> Sequence[Sequence[ExpertRange]]:
        """The experts and rows of each chunk on this rank, in the order of computation."""

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Wait for a chunk: rows ``[R, H]`` sorted by its experts, and ``[E]`` int32, the end of each expert's rows."""

    def return_chunk(self, chunk: int, results: Tensor) -> None:
        """Send back the results ``[R, H]`` of the chunk's rows."""

    def combine(self) -> Tensor:
        """Return the weighted sums ``[T, H]`` of the results."""


class Dispatcher(Protocol):
    """Sends rows to the ranks of their experts, and results back; ``bytes_sent`` to other ranks in forwards."""

    bytes_sent: int

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> Any:
        """Plan the exchange from the experts ``[T, k]`` of this rank's tokens; once per layer and forward."""

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: Any, spans: LayerSpans) -> DispatchHandle:
        """Send a row of each token ``[T, H]`` to each of its experts; differentiable, with combining by ``weights``."""


class _LocalDispatcher:
    """All experts are on this rank."""

    bytes_sent = 0

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> TokenPermutation:
        return sort_by_expert(top_k_index, num_experts)

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: TokenPermutation, spans: LayerSpans) -> _LocalDispatch:
        return _LocalDispatch(tokens, weights, plan)


class _LocalDispatch:
    def __init__(self, tokens: Tensor, weights: Tensor, routes: TokenPermutation) -> None:
        self.ranges = [[ExpertRange(0, len(routes.ends), 0, len(routes.token_of_row))]]
        self._rows, self._weights, self._routes = take_rows(tokens, routes), weights, routes

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        return self._rows, self._routes.ends

    def return_chunk(self, chunk: int, results: Tensor) -> None:
        self._rows = results

    def combine(self) -> Tensor:
        return combine_rows(self._rows, self._weights, self._routes)


@dataclass(frozen=True)
class ExpertSettings:
    """How the experts of a layer are computed."""

    dispatcher: Dispatcher  # sends rows to the experts; with several ranks, each rank has the weights of some experts
    row_budget: int | None = None  # see :class:`omnitrain.ops.experts.grouped_mm.ProductMemory`
    recomputes_activation: bool = False
    # makes a context for the matmuls of the given rows, such as one that offloads their saved tensors
    saving: Callable[[Tensor], AbstractContextManager[None]] | None = None
    # compute the gradients of matrices last, during the communication of rows' gradients
    delays_weight_gradients: bool = False
    # computes another part of the layer during the communication of the last results
    overlap_with: Callable[[LayerSpans], None] | None = None
    spans: LayerSpans = NOT_RECORDED  # records time spans


def settings_of(module: nn.Module) -> ExpertSettings:
    """Return how the experts ``module`` are computed."""
    return getattr(module, SETTINGS, _AS_THEY_ARE)


_AS_THEY_ARE = ExpertSettings(_LocalDispatcher())


def bytes_sent(module: nn.Module) -> int:
    """Return the bytes that the experts ``module`` sent to other ranks in forwards since the last call."""
    dispatcher = settings_of(module).dispatcher
    sent = dispatcher.bytes_sent
    if sent:
        dispatcher.bytes_sent = 0
    return sent


@torch.compiler.disable  # rows per expert are values: torch would recompile a traced call for each routing
def omnitrain_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, backend: str
) -> Tensor:
    """Compute the weighted sum ``[T, H]`` of each token's experts; for transformers' ``ExpertsInterface``.

    ``hidden_states`` are ``[T, H]``, ``top_k_index`` ``[T, k]`` indices of experts in the whole layer,
    ``top_k_weights`` ``[T, k]``. The result has the dtype of ``hidden_states``.
    """
    settings = settings_of(module)
    spans = settings.spans
    plan = cached_for_recompute(lambda: settings.dispatcher.plan(top_k_index, num_experts_of(module), spans))
    memory = ProductMemory(settings.row_budget, settings.recomputes_activation)
    compute = chosen(module, hidden_states, backend).run
    # Dispatch's backward runs last, so delayed weight gradients overlap with it.
    handle = settings.dispatcher.dispatch(hidden_states, top_k_weights, plan, spans)
    work = WeightGradients(spans.weight_gradients) if settings.delays_weight_gradients else None
    for chunk, experts in enumerate(ExpertWeights.of(module).in_chunks(handle.ranges, work, delayed_to())):
        rows, ends = handle.wait_chunk(chunk)
        with settings.saving(rows) if settings.saving is not None else nullcontext():
            results = spans.experts(chunk, rows, partial(compute, experts, rows, ends, memory))
        handle.return_chunk(chunk, results)
    if settings.overlap_with is not None:
        settings.overlap_with(spans)
    return handle.combine()
