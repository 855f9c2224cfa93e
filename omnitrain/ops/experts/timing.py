"""Time spans of one layer's experts: matmuls, communication, waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from omnitrain.ops.experts.routing_tape import is_replaying
from omnitrain.ops.timing import Kind, Mark, Phase, SpanRecorder, What

Wait = Callable[[], Any]


class LayerSpans:
    """Records the time spans of the layer ``layer``, the name of the experts' module."""

    def __init__(self, recorder: SpanRecorder, layer: str) -> None:
        self._recorder, self._layer = recorder, layer

    def travelling(self, name: str, chunk: int, wait: Wait, *, backward: bool = False) -> Wait:
        """Wrap ``wait`` of an exchange that starts now: its call records the wait and ends the exchange's span."""
        if not self._recorder.is_on:
            return wait
        what, started = self._what("link", name, chunk, backward=backward), self._recorder.mark()

        def measured() -> None:
            with self._during("wait", name, chunk, backward=backward):
                wait()
            self._recorder.add(what, started, self._recorder.mark())

        return measured

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Record waiting for an exchange inside the context, in a forward."""
        return self._during("wait", name)

    def weight_gradients(self) -> AbstractContextManager[None]:
        """Record the computation of delayed weight gradients inside the context."""
        return self._during("compute", "weight gradients", backward=True)

    def experts(self, chunk: int, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``compute`` for ``rows``, which nothing else reads, and record it."""
        return self._computed("experts", chunk, rows, compute) if self._recorder.is_on else compute()

    def shared_experts(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of the shared experts for ``hidden``, and record it."""
        if not self._recorder.is_on:
            return compute(hidden)
        own = hidden.view_as(hidden)  # `hidden` has other consumers, so its gradient is complete much later
        return self._computed("shared experts", None, own, lambda: compute(own))

    def _computed(self, name: str, chunk: int | None, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The backward begins with the gradient of the results, and ends with the gradient of ``rows``."""
        with self._during("compute", name, chunk):
            results = compute()
        if rows.requires_grad and results.requires_grad:
            what, begun = self._what("compute", name, chunk, backward=True), list[Mark]()
            results.register_hook(lambda _: begun.append(self._recorder.mark()))
            rows.register_hook(lambda _: self._recorder.add(what, begun.pop(), self._recorder.mark()))
        return results

    def _what(self, kind: Kind, name: str, chunk: int | None = None, *, backward: bool = False) -> What:
        phase: Phase = "backward" if backward else "recompute" if is_replaying() else "forward"
        return What(kind, name, phase, self._layer, chunk)

    def _during(
        self, kind: Kind, name: str, chunk: int | None = None, *, backward: bool = False
    ) -> AbstractContextManager[None]:
        if not self._recorder.is_on:
            return nullcontext()
        return self._recorder.span(self._what(kind, name, chunk, backward=backward))


NOT_RECORDED = LayerSpans(SpanRecorder(), "")
