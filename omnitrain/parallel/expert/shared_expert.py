"""Experts that every token has, computed while the others' last results are on their way.

A layer's forward calls them behind those that tokens choose, with the layer's own input, and then adds. Nothing keeps
them from being computed earlier: the experts' function does it when it would wait, and the layer's own call gets the
result. In the backward they fill, in the same way, the wait for the first gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from omnitrain.models.contract.harness import Failure, attempt
from omnitrain.ops.experts import LayerSpans

_TRIAL_TOKENS = 4


def shared_experts(layer: nn.Module, experts: nn.Module, device: torch.device) -> nn.Module | None:
    """The child of ``layer`` that is called once, behind ``experts``, with the layer's input alone.

    Found by a forward of the layer on zeros, also in the place of its weights, whose ``experts`` compute nothing.

    Args:
        layer: of which ``experts`` is a child. Its weights may be on the meta device, and its buffers elsewhere.
        experts: that tokens choose.
        device: on which the forward runs.

    Returns:
        None: there is none, or the layer wants more than hidden states.
    """
    inner: Any = experts
    weight = inner.down_proj
    width = weight.size(-1) if inner.is_transposed else weight.size(-2)
    for dtype in dict.fromkeys(parameter.dtype for parameter in layer.parameters()):  # what is frozen keeps its own
        hidden = torch.zeros(1, _TRIAL_TOKENS, width, dtype=dtype, device=device)
        if (found := _called_behind(layer, experts, hidden)) is not None:
            return found
    return None


def _called_behind(layer: nn.Module, experts: nn.Module, hidden: Tensor) -> nn.Module | None:
    """The one child that is called behind ``experts`` and with ``hidden`` alone, where ``layer`` takes that."""
    calls: list[tuple[nn.Module, bool]] = []  # behind the experts: who, and whether with the hidden states alone

    def note(module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        calls.append((module, not given and len(arguments) == 1 and arguments[0] is hidden))

    def compute_nothing(rows: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.clear()
        return torch.zeros_like(rows)

    of_experts = {*experts.parameters(), *experts.buffers()}
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    zeros = {n: torch.zeros_like(value, device=hidden.device) for n, value in tensors if value not in of_experts}
    drawn_on = [hidden.device] if hidden.device.type == "cuda" else []
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(drawn_on):  # some routers draw in training
        for child in layer.children():
            if child is not experts:
                stack.callback(child.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.callback(delattr, experts, "forward")
        experts.forward = compute_nothing
        if isinstance(attempt(lambda: functional_call(layer, zeros, (hidden,))), Failure):
            return None  # it wants something else than in training
    return calls[0][0] if [is_alike for _, is_alike in calls] == [True] else None


class SharedExpertOverlap:
    """Lets ``shared`` be computed before ``layer`` calls it.

    Args:
        layer: gets the hidden states as its first argument.
        shared: see :func:`shared_experts`.
    """

    def __init__(self, layer: nn.Module, shared: nn.Module) -> None:
        self._forward: Callable[[Tensor], Tensor] = shared.forward
        self._shared = shared
        self._hidden: Tensor | None = None
        self._result: Tensor | None = None
        layer.register_forward_pre_hook(self._enter, prepend=True)
        layer.register_forward_hook(self._leave, always_call=True)
        shared.forward = self._given

    def compute(self, spans: LayerSpans) -> None:
        """Of the forward of the layer that goes on."""
        hooks = (*self._shared._forward_pre_hooks, *self._shared._forward_hooks)
        if self._hidden is not None and not hooks:  # those of others expect to run around it
            self._result = spans.shared_experts(self._hidden, self._forward)

    def _enter(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._hidden = arguments[0] if arguments else None

    def _leave(self, *_: Any) -> None:
        self._hidden = self._result = None

    def _given(self, hidden: Tensor) -> Tensor:
        if self._result is None or hidden is not self._hidden:
            return self._forward(hidden)
        return self._result
