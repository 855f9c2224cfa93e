"""Contexts of a forward, entered again for its recompute: the forward has left them when the backward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from omnitrain.ops.attention.packed_context import inside, packed_sequence
from omnitrain.ops.cpu.unread_rows import reading, rows_read
from omnitrain.ops.delayed_wgrad import delayed_to, delaying
from omnitrain.ops.experts.routing_tape import RoutingTape

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
