"""Experts under tensor parallelism: divide tokens that several ranks hold, then all-gather the results."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.experts.entry import Dispatcher, DispatchHandle
from omnitrain.ops.experts.timing import LayerSpans


class TPTokenDispatcher:
    """A :class:`omnitrain.ops.experts.Dispatcher` that passes this rank's slice of the tokens to another dispatcher.

    The ranks of ``group`` hold the same tokens. The gradients of replicated tensors are partial on each rank and sum
    over ``group``, as everywhere in tensor parallelism.
    """

    def __init__(self, inner: Dispatcher, group: dist.ProcessGroup) -> None:
        self.inner, self._group = inner, group

    @property
    def bytes_sent(self) -> int:  # noqa: D102
        return self.inner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, number: int) -> None:
        self.inner.bytes_sent = number

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> Any:  # noqa: D102
        return self.inner.plan(top_k_index[self._local_slice(len(top_k_index))], num_experts, spans)

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: Any, spans: LayerSpans) -> DispatchHandle:  # noqa: D102
        local = self._local_slice(len(tokens))
        handle = self.inner.dispatch(tokens[local], weights[local], plan, spans)
        return _TokenSliceHandle(handle, self._lengths(len(tokens)), self._group)

    def _lengths(self, num_tokens: int) -> list[int]:
        """The number of tokens of each rank."""
        each, left = divmod(num_tokens, self._group.size())
        return [each + (rank < left) for rank in range(self._group.size())]

    def _local_slice(self, num_tokens: int) -> slice:
        stops = list(accumulate(self._lengths(num_tokens), initial=0))
        return slice(*stops[self._group.rank() :][:2])


class _TokenSliceHandle:
    def __init__(self, handle: DispatchHandle, lengths: list[int], group: dist.ProcessGroup) -> None:
        self.ranges = handle.ranges
        self.wait_chunk, self.return_chunk = handle.wait_chunk, handle.return_chunk
        self._handle, self._lengths, self._group = handle, lengths, group

    def combine(self) -> Tensor:
        return gather_rows(self._handle.combine(), self._lengths, self._group)
