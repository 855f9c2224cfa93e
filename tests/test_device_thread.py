"""The worker thread in which backwards run with ``--device-thread`` is autograd's, as on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from omnitrain.ops.collectives import with_backward
from omnitrain.parallel.spawn.pool import RankPool
from tests import device_thread

CALLER = ContextVar("caller", default="nobody")


def test_a_backward_has_the_thread_and_the_state_that_it_has_on_a_gpu(fresh_rank: RankPool) -> None:
    (found,) = fresh_rank.run(what_backwards_see, timeout_s=60)
    assert found == {
        "plain": ("worker", "nobody", "modes"),
        "inside another": ("worker", "nobody", "modes"),
        "reentrant checkpoint": ("worker", "nobody", "modes"),
        "checkpoint": ("worker", "nobody", "modes"),
        "single thread": ("caller", "me", "modes"),
        "of another thread": ("worker", "nobody", "no modes"),
    }


class Watching(TorchDispatchMode):
    """Knows whether the thread that asks computes under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = True
        return function(*args, **(kwargs or {}))


def what_backwards_see() -> dict[str, tuple[str, str, str]]:
    device_thread.install()
    CALLER.set("me")
    found: dict[str, tuple[str, str, str]] = {}
    threads = {threading.get_ident(): "caller"}
    watching = Watching()

    def note(name: str) -> Callable[[Tensor], Tensor]:
        def back(gradient: Tensor) -> Tensor:
            thread = threads.setdefault(threading.get_ident(), "worker" if len(threads) == 1 else "a third")
            watching.seen = False
            doubled = gradient * 2
            found[name] = thread, CALLER.get(), "modes" if watching.seen else "no modes"
            return doubled

        return lambda x: with_backward(lambda t: t.clone(), back, x)

    x = torch.ones(2, requires_grad=True)

    def nested(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = torch.ones(2, requires_grad=True)
            return gradient * torch.autograd.grad(note("inside another")(leaf).sum(), leaf)[0]

    with watching:
        note("plain")(x).sum().backward()
        with_backward(lambda t: t.clone(), nested, x).sum().backward()
        for name, reentrant in (("reentrant checkpoint", True), ("checkpoint", False)):
            checkpoint(note(name), x, use_reentrant=reentrant).sum().backward()
        with set_multithreading_enabled(False):
            note("single thread")(x).sum().backward()
    other = threading.Thread(target=note("of another thread")(x).sum().backward)
    other.start()
    other.join()
    assert x.grad is not None and x.grad.tolist() == [12, 12]
    return found


def test_the_worker_that_waits_makes_a_backward_of_another_thread_wait_and_errors_reach_the_caller(
    fresh_rank: RankPool,
) -> None:
    assert fresh_rank.run(order_of_two_backwards, timeout_s=60) == [["first begins", "first ends", "second", "told"]]


def order_of_two_backwards() -> list[str]:
    device_thread.install()
    order = list[str]()
    begun, may_end = threading.Event(), threading.Event()

    def first(gradient: Tensor) -> Tensor:
        order.append("first begins")
        begun.set()
        may_end.wait()
        order.append("first ends")
        return gradient

    def second(gradient: Tensor) -> Tensor:
        order.append("second")
        raise KeyError("told")

    def backward(back: Callable[[Tensor], Tensor]) -> None:
        try:
            with_backward(lambda t: t.clone(), back, torch.ones((), requires_grad=True)).backward()
        except KeyError as error:
            order.append(error.args[0])

    threads = [threading.Thread(target=backward, args=(back,)) for back in (first, second)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join()
    return order
