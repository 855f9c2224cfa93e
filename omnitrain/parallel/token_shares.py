"""Experts of tokens that several ranks hold alike: each computes its share of them, and all get all results."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.experts import Dispatcher, Journey, LayerSpans


class ShareOfTokens:
    """A :class:`omnitrain.ops.experts.Dispatcher` that hands another one this rank's run of the tokens.

    A rank's gradients of what the ranks hold alike are its own part of it, as everywhere in tensor parallelism: they
    add up over these ranks.

    Args:
        inner: brings rows to their experts.
        alike: ranks that hold the same tokens.
    """

    def __init__(self, inner: Dispatcher, alike: dist.ProcessGroup) -> None:
        self._inner, self._alike = inner, alike

    @property
    def bytes_sent(self) -> int:  # noqa: D102
        return self._inner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, number: int) -> None:
        self._inner.bytes_sent = number

    def plan(self, top_k_index: Tensor, num_experts: int, spans: LayerSpans) -> Any:  # noqa: D102
        return self._inner.plan(top_k_index[self._own(len(top_k_index))], num_experts, spans)

    def depart(self, tokens: Tensor, plan: Any, spans: LayerSpans) -> Journey:  # noqa: D102
        return _JourneyOfShare(self, self._inner.depart(tokens[self._own(len(tokens))], plan, spans))

    def combined(self, journey: Journey, weights: Tensor) -> Tensor:
        """The results of all tokens ``[T, H]``, of which ``journey`` has this rank's."""
        num_tokens = len(weights)
        return gather_rows(journey.combine(weights[self._own(num_tokens)]), self._shares(num_tokens), self._alike)

    def _shares(self, num_tokens: int) -> list[int]:
        """How many of the tokens each rank takes."""
        each, left = divmod(num_tokens, self._alike.size())
        return [each + (rank < left) for rank in range(self._alike.size())]

    def _own(self, num_tokens: int) -> slice:
        """This rank's."""
        stops = list(accumulate(self._shares(num_tokens), initial=0))
        return slice(*stops[self._alike.rank() :][:2])


class _JourneyOfShare:
    def __init__(self, dispatcher: ShareOfTokens, journey: Journey) -> None:
        self.num_chunks = journey.num_chunks
        self.arrive, self.send_back = journey.arrive, journey.send_back
        self._dispatcher, self._journey = dispatcher, journey

    def combine(self, weights: Tensor) -> Tensor:
        return self._dispatcher.combined(self._journey, weights)
