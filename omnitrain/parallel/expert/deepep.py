"""Dispatch tokens through DeepEP (the `Buffer` of github.com/deepseek-ai/DeepEP), if it is installed and works.

DeepEP sends a token with its weights once to each rank that has some of its experts, and sums the ranks' results in the
combine. So each rank multiplies the results of its experts with their weights. Dispatch and combine are each other's
backward. DeepEP needs bf16 rows on CUDA, synchronizes in every dispatch, also in recompute, and overlaps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.collectives import with_backward
from omnitrain.ops.experts.permute import TokenPermutation, combine_rows, sort_by_expert, take_rows
from omnitrain.ops.experts.routing_tape import is_replaying
from omnitrain.ops.experts.timing import LayerSpans
from omnitrain.ops.experts.weights import ExpertRange


def deepep_problem(device_type: str, compute: str | None) -> str:
    """Return why DeepEP cannot be used with rows of dtype ``compute``; empty if it can be tried."""
    if find_spec("deep_ep") is None:
        return "deep_ep is not installed"
    if device_type != "cuda":
        return f"DeepEP runs on CUDA, not on {device_type}"
    if compute != "bfloat16":
        return f"DeepEP needs bfloat16, and the component computes in {compute}"
    return ""


def open_deepep(group: dist.ProcessGroup, hidden: int, device: torch.device) -> tuple[Any, str]:
    """Create a buffer, and test it by an exchange, on all ranks. Returns it, or None and why some rank failed."""
    buffer: Any = None
    problem = ""
    try:
        kind = import_module("deep_ep").Buffer
        size, nvlink, rdma = hidden * torch.bfloat16.itemsize, 0, 0
        for config in (kind.get_dispatch_config(group.size()), kind.get_combine_config(group.size())):
            nvlink = max(nvlink, config.get_nvl_buffer_size_hint(size, group.size()))
            rdma = max(rdma, config.get_rdma_buffer_size_hint(size, group.size()))
        buffer = kind(group, nvlink, rdma)
        problem = _probe(buffer, group, hidden, device)
    except Exception as error:  # DeepEP can raise any type
        problem = f"{type(error).__name__}: {error}"
    works = torch.tensor(float(not problem), device=device)
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    if works.item():
        return buffer, ""
    return None, problem or "its exchange failed on another rank"


def _probe(buffer: Any, group: dist.ProcessGroup, hidden: int, device: torch.device) -> str:
    """Send each token to one expert on every rank, without computing; return the problem, or an empty text."""
    ranks = group.size()
    index = torch.arange(ranks, device=device).expand(4, -1)
    tokens = torch.full((4, hidden), float(group.rank() + 1), device=device, dtype=torch.bfloat16)
    handle = _DeepEPDispatch(buffer, tokens, torch.ones(index.shape, device=device), index, ranks)
    rows, _ = handle.wait_chunk(0)
    handle.return_chunk(0, rows)
    combined = handle.combine()
    return "" if torch.equal(combined, ranks * tokens) else "its exchange returned wrong values"


class DeepEpDispatcher:
    """A :class:`omnitrain.ops.experts.entry.Dispatcher` over a DeepEP buffer of the ranks that share the experts."""

    def __init__(self, buffer: Any) -> None:
        self.bytes_sent = 0
        self._buffer = buffer

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> tuple[Tensor, int]:  # noqa: D102
        return top_k_index, num_experts

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: tuple[Tensor, int], spans: LayerSpans) -> _DeepEPDispatch:  # noqa: D102
        with spans.waiting("dispatch"):
            handle = _DeepEPDispatch(self._buffer, tokens, weights, *plan)
        if not is_replaying():
            self.bytes_sent += handle.rows_to_others * tokens.size(1) * tokens.element_size()
        return handle


class _DeepEPDispatch:
    """A :class:`omnitrain.ops.experts.DispatchHandle`; all experts of a rank are one chunk."""

    def __init__(self, buffer: Any, tokens: Tensor, weights: Tensor, index: Tensor, num_experts: int) -> None:
        self._call = _DeepEPCall(buffer, index, num_experts)
        self._dtype = weights.dtype
        self._tokens, self._weights = with_backward(self._call.dispatch, self._call.combine, tokens, weights.float())
        self._routes = self._call.routes()
        self.rows_to_others = self._call.rows_to_others
        self.ranges: Sequence[Sequence[ExpertRange]] = [
            [ExpertRange(0, len(self._routes.ends), 0, self._call.num_rows)]
        ]

    def wait_chunk(self, chunk: int) -> tuple[Tensor, Tensor]:
        return take_rows(self._tokens, self._routes)[: self._call.num_rows], self._routes.ends

    def return_chunk(self, chunk: int, results: Tensor) -> None:
        padded = torch.nn.functional.pad(results, (0, 0, 0, len(self._routes.token_of_row) - len(results)))
        weighted = combine_rows(padded, self._weights.to(self._dtype), self._routes)
        self._results: Tensor = with_backward(self._call.combine_rows, self._call.dispatch_again, weighted)

    def combine(self) -> Tensor:
        return self._results


class _DeepEPCall:
    """One dispatch of DeepEP, with its handle for the combine."""

    def __init__(self, buffer: Any, index: Tensor, num_experts: int) -> None:
        self.buffer, self.index, self.num_experts = buffer, index, num_experts
        self.rows_to_others = self.num_rows = 0
        self._handle: Any = None
        self._received = index

    def dispatch(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Receive tokens ``[n, H]`` for this rank's experts, and weights ``[n, k]``, 0 for experts of other ranks."""
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
            self.index, self.num_experts
        )
        received, self._received, received_weights, counts, self._handle, _ = self.buffer.dispatch(
            tokens,
            topk_idx=self.index,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        self.num_rows = sum(counts)
        sent = per_rank.tolist()
        self.rows_to_others = 2 * (sum(sent) - sent[self.buffer.rank])
        return received, received_weights

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Dispatch other values of the same tokens."""
        received: Tensor = self.buffer.dispatch(tokens.contiguous(), handle=self._handle)[0]
        return received

    def combine(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sum each token's rows and weights over the ranks that it was sent to."""
        combined, combined_weights, _ = self.buffer.combine(
            rows.contiguous(), self._handle, topk_weights=weights.contiguous()
        )
        return combined, combined_weights

    def combine_rows(self, rows: Tensor) -> Tensor:
        """Like :meth:`combine`, only for rows."""
        combined: Tensor = self.buffer.combine(rows.contiguous(), self._handle, topk_weights=None)[0]
        return combined

    def routes(self) -> TokenPermutation:
        """Sort received tokens into rows of this rank's experts; one extra row stands for experts of other ranks."""
        local = self.num_experts // self.buffer.group_size
        routes = sort_by_expert(self._received.where(self._received >= 0, local), local + 1)
        if not len(self._received):
            return TokenPermutation(routes.token_of_row, routes.row_of_slot, routes.ends[:-1])
        token = torch.cat([routes.token_of_row[: self.num_rows], routes.token_of_row.new_zeros(1)])
        return TokenPermutation(token, routes.row_of_slot.clamp(max=self.num_rows), routes.ends[:-1])
