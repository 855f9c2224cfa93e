"""Contexts of a forward, entered again for its recompute: the forward has left them when the backward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from omnitrain.ops.attention.packed_context import inside, packed_sequence
from omnitrain.ops.cpu.unread_rows import reading, rows_read
from omnitrain.ops.delayed_wgrad import delayed_to, delaying
from omnitrain.ops.experts.routing_tape import RoutingTape
from omnitrain.ops.patch_forward import set_forward

MakeContext = Callable[[], AbstractContextManager[Any]]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute_contexts(
    has_routers: bool = True, in_forward: Sequence[MakeContext] = (), in_recompute: Sequence[MakeContext] = ()
) -> Contexts:
    """Return the contexts of a forward and of its recompute: ``context_fn`` of ``torch.utils.checkpoint``.

    The recompute replays routing: rounding may differ, and a token that then went to another expert would have another
    gradient, or change the number of rows on some rank. ``in_forward`` and ``in_recompute`` are further contexts.
    """
    forward: list[MakeContext] = []
    recompute: list[MakeContext] = [
        partial(inside, packed_sequence()),
        partial(reading, rows_read()),
        partial(delaying, delayed_to()),
    ]
    if has_routers:
        tape = RoutingTape()
        forward, recompute = [tape.recording], [*recompute, tape.replaying]
    return _EnteredContexts([*forward, *in_forward]), _EnteredContexts([*recompute, *in_recompute])


@dataclass
class RecomputedCall:
    """How a module computes in a checkpoint: ``checkpoint(run with its keywords, other inputs)``."""

    run: Callable[..., Any]  # its forward
    checkpoint: Callable[..., Any]


_CALL = "_recomputed_call"


def recompute_call(module: nn.Module, checkpoint: Callable[..., Any]) -> None:
    """Let each call of a module in training be ``checkpoint(its forward, inputs)``."""
    setattr(module, _CALL, RecomputedCall(module.forward, checkpoint))
    set_forward(module, _call_recomputed)


def recomputed_call_of(module: nn.Module) -> RecomputedCall | None:
    """Return what :func:`recompute_call` set; None: the module keeps what its backward needs."""
    return vars(module).get(_CALL)


@torch.compiler.disable  # torch compiles nothing around a checkpoint with contexts of its own, but all inside of it
def _call_recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call: RecomputedCall = vars(module)[_CALL]
    if not (module.training and torch.is_grad_enabled()):
        return call.run(*args, **kwargs)
    return call.checkpoint(partial(call.run, **kwargs), *args)


class _EnteredContexts(AbstractContextManager[None]):
    """Enters new contexts from all ``makers`` each time; a graph's recompute may run several times."""

    def __init__(self, makers: Sequence[MakeContext]) -> None:
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
