"""The one experts function that is registered with transformers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from omnitrain.ops.experts.choose import chosen
from omnitrain.ops.experts.declared import ExpertWeights, num_experts_of
from omnitrain.ops.experts.routes import Routes, combine_rows, sort_by_expert, take_rows
from omnitrain.ops.experts.tape import once

_DISPATCHER, _BUDGET = "_token_dispatcher", "_row_budget"


class Dispatcher(Protocol):
    """Brings rows to the ranks of their experts, and results back.

    ``plan`` is computed once per layer and forward; the other two take it, may be called on runs of tokens, and are
    differentiable.

    Attributes:
        bytes_sent: in forwards, to other ranks.
    """

    bytes_sent: int

    def plan(self, top_k_index: Tensor, num_experts: int) -> Any:
        """Who sends what to whom, from the experts ``[T, k]`` of this rank's tokens."""
        ...

    def dispatch(self, tokens: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """``[T, H]`` -> rows ``[R, H]`` sorted by this rank's experts, and ``[E]`` int32 ends of their runs."""
        ...

    def combine(self, rows: Tensor, weights: Tensor, plan: Any) -> Tensor:
        """Results ``[R, H]`` of the rows, weights ``[T, k]`` -> ``[T, H]``."""
        ...


class _Here:
    """All experts are on this rank."""

    bytes_sent = 0

    def plan(self, top_k_index: Tensor, num_experts: int) -> Routes:
        return sort_by_expert(top_k_index, num_experts)

    def dispatch(self, tokens: Tensor, plan: Routes) -> tuple[Tensor, Tensor]:
        return take_rows(tokens, plan), plan.ends

    def combine(self, rows: Tensor, weights: Tensor, plan: Routes) -> Tensor:
        return combine_rows(rows, weights, plan)


_HERE = _Here()


def set_dispatcher(module: nn.Module, dispatcher: Dispatcher) -> None:
    """From now on the experts ``module``, whose weights are a part of them on each rank, get rows by ``dispatcher``."""
    setattr(module, _DISPATCHER, dispatcher)


def bytes_sent(module: nn.Module) -> int:
    """What the experts ``module`` has sent to other ranks in forwards since this was asked last."""
    dispatcher: Dispatcher = getattr(module, _DISPATCHER, _HERE)
    sent = dispatcher.bytes_sent
    if sent:
        dispatcher.bytes_sent = 0
    return sent


def set_row_budget(module: nn.Module, budget: int | None) -> None:
    """From now on the experts ``module`` compute so many rows at a time; None: all at once."""
    setattr(module, _BUDGET, budget)


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
    dispatcher: Dispatcher = getattr(module, _DISPATCHER, _HERE)
    plan = once(lambda: dispatcher.plan(top_k_index, num_experts_of(module)))
    rows, ends = dispatcher.dispatch(hidden_states, plan)
    compute = chosen(module, rows, backend).run
    results = compute(ExpertWeights(module), rows, ends, getattr(module, _BUDGET, None))
    return dispatcher.combine(results, top_k_weights, plan)
