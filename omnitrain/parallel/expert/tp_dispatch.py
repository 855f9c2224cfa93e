"""Experts of tokens that several ranks hold alike: each computes its share of them, and all get all results."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.experts import Dispatcher, DispatchHandle, LayerSpans


class TPTokenDispatcher:
    """A :class:`omnitrain.ops.experts.Dispatcher` that hands another one this rank's run of the tokens.

    A rank's gradients of what the ranks hold alike are its own part of it, as everywhere in tensor parallelism: they
    add up over these ranks.

    Args:
        inner: brings rows to their experts.
        alike: ranks that hold the same tokens.
    """

    def __init__(self, inner: Dispatcher, alike: dist.ProcessGroup) -> None:
        self.inner, self._alike = inner, alike

    @property
    def bytes_sent(self) -> int:  # noqa: D102
        return self.inner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, number: int) -> None:
        self.inner.bytes_sent = number

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> Any:  # noqa: D102
        return self.inner.plan(top_k_index[self._own(len(top_k_index))], num_experts, spans)

    def dispatch(self, tokens: Tensor, weights: Tensor, plan: Any, spans: LayerSpans) -> DispatchHandle:  # noqa: D102
        own = self._own(len(tokens))
        handle = self.inner.dispatch(tokens[own], weights[own], plan, spans)
        return _TokenSliceHandle(handle, self._shares(len(tokens)), self._alike)

    def _shares(self, num_tokens: int) -> list[int]:
        """How many of the tokens each rank takes."""
        each, left = divmod(num_tokens, self._alike.size())
        return [each + (rank < left) for rank in range(self._alike.size())]

    def _own(self, num_tokens: int) -> slice:
        """This rank's."""
        stops = list(accumulate(self._shares(num_tokens), initial=0))
        return slice(*stops[self._alike.rank() :][:2])


class _TokenSliceHandle:
    def __init__(self, handle: DispatchHandle, shares: list[int], alike: dist.ProcessGroup) -> None:
        self.ranges = handle.ranges
        self.wait_chunk, self.return_chunk = handle.wait_chunk, handle.return_chunk
        self._handle, self._shares, self._alike = handle, shares, alike

    def combine(self) -> Tensor:
        return gather_rows(self._handle.combine(), self._shares, self._alike)
