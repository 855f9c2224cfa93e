"""Compute shared experts while the last results of the routed experts are in flight.

A layer's forward calls its shared experts after the routed ones, with the layer's input, and adds the results. They can
run earlier: the routed experts' function computes them while it would wait, and the layer's call gets the stored
result. In the backward they overlap in the same way with the wait for the first gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from omnitrain.models.contract.trial import Failure, attempt
from omnitrain.ops.experts.timing import LayerSpans
from omnitrain.torch_private import has_hooks

_TRIAL_TOKENS = 4


def shared_experts(layer: nn.Module, experts: nn.Module, device: torch.device) -> nn.Module | None:
    """Return the child of ``layer`` that is called once, after ``experts``, with only the layer's input; None: none is.

    A forward of the layer on ``device`` with zeros as input and weights, whose ``experts`` compute nothing, shows the
    calls. The layer's weights may be on the meta device, and its buffers elsewhere.
    """
    inner: Any = experts
    weight = inner.down_proj
    width = weight.size(-1) if inner.is_transposed else weight.size(-2)
    for dtype in dict.fromkeys(parameter.dtype for parameter in layer.parameters()):  # frozen weights keep their dtype
        hidden = torch.zeros(1, _TRIAL_TOKENS, width, dtype=dtype, device=device)
        if (shared := _called_after(layer, experts, hidden)) is not None:
            return shared
    return None


def _called_after(layer: nn.Module, experts: nn.Module, hidden: Tensor) -> nn.Module | None:
    """The only child that ``layer(hidden)`` calls after ``experts``, if it gets only ``hidden``."""
    calls: list[tuple[nn.Module, bool]] = []  # after the experts: the child, and whether it gets only `hidden`

    def note(module: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, not kwargs and len(arguments) == 1 and arguments[0] is hidden))

    def compute_nothing(rows: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.clear()
        return torch.zeros_like(rows)

    of_experts = {*experts.parameters(), *experts.buffers()}
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    zeros = {n: torch.zeros_like(value, device=hidden.device) for n, value in tensors if value not in of_experts}
    rng_devices = [hidden.device] if hidden.device.type == "cuda" else []
    # Some routers draw random numbers in training.
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(rng_devices):
        for child in layer.children():
            if child is not experts:
                stack.callback(child.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.callback(delattr, experts, "forward")
        experts.forward = compute_nothing
        if isinstance(attempt(lambda: functional_call(layer, zeros, (hidden,))), Failure):
            return None  # the layer needs other arguments
    return calls[0][0] if [gets_hidden for _, gets_hidden in calls] == [True] else None


@dataclass
class _Running:
    """A forward of a layer with shared experts: its input, and what they computed from it, if they ran already."""

    hidden: Tensor
    result: Tensor | None = None


# The layer that runs in this thread: a backward may recompute a layer while another forward of it runs.
_running: ContextVar[_Running | None] = ContextVar("layer_with_shared_experts", default=None)


class SharedExpertOverlap:
    """Compute ``shared`` (see :func:`shared_experts`) before ``layer`` calls it."""

    def __init__(self, layer: nn.Module, shared: nn.Module) -> None:
        self._forward: Callable[[Tensor], Tensor] = shared.forward
        self._shared = shared
        layer.register_forward_pre_hook(self._begin, prepend=True)
        layer.register_forward_hook(self._end, always_call=True)
        shared.forward = self._stored_or_computed

    def compute(self, spans: LayerSpans) -> None:
        """Compute the shared experts for the current forward of the layer."""
        running = _running.get()
        # Hooks of other code expect to run around the forward.
        if running is not None and not has_hooks(self._shared, backward=False):
            running.result = spans.shared_experts(running.hidden, self._forward)

    def _begin(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        _running.set(_Running(arguments[0]) if arguments else None)

    def _end(self, *_: Any) -> None:
        _running.set(None)

    def _stored_or_computed(self, hidden: Tensor) -> Tensor:
        running = _running.get()
        if running is None or running.result is None or hidden is not running.hidden:
            return self._forward(hidden)
        return running.result
