"""Replace the forward of single modules; classes, parameters and the keys of the state dict stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

Forward = Callable[..., Any]  # (module, *args, **kwargs)


def forward_of(module: nn.Module) -> Forward:
    """Return the module's current forward: its class's forward, or its replacement."""
    replaced = vars(module).get("forward")
    return type(module).forward if replaced is None else replaced.__func__


def set_forward(module: nn.Module, forward: Forward) -> None:
    """Replace the module's forward by a bound method, so that deep copies of the module get their own."""
    module.forward = MethodType(forward, module)


_changed_by: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@contextmanager
def changed_by_one_thread(module: nn.Module) -> Iterator[None]:
    """Assert that no other thread changes the module meanwhile: for one call, its forward reads other values."""
    thread, former = get_ident(), _changed_by.get(module)
    assert former in (None, thread), f"two threads run {type(module).__name__} at once, which is changed for a call"
    _changed_by[module] = thread
    try:
        yield
    finally:
        if former is None:
            del _changed_by[module]


@contextmanager
def own_forward(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Replace the module's forward by a function of its arguments within the context; None: its class's forward."""
    attributes = vars(module)
    before = attributes.pop("forward", None)
    if forward is not None:
        attributes["forward"] = forward
    try:
        yield
    finally:
        attributes.pop("forward", None)
        if before is not None:
            attributes["forward"] = before


@contextmanager
def wrapped_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's forward within the context; while the replacement runs, the former forward is back."""
    former = vars(module).get("forward")

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with own_forward(module, former):
            return forward(*args, **kwargs)

    with changed_by_one_thread(module), own_forward(module, wrapper):
        yield


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
