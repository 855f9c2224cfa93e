"""Backwards on a CPU run in a worker thread of autograd, as they do on a GPU: ``pytest --device-thread``.

Autograd has one worker thread for each device that is not a CPU, and runs there what it computes on the device. Whoever
calls ``backward`` waits. A device that is made in Python (torch's PrivateUse1) has such a worker, too, and needs no
hardware. :func:`install` makes one, and hides each backward on the CPU in a backward of one node on this device. So
torch's own engine runs the backward, in torch's own worker.

As on a GPU:

- One worker for all threads of a process. While it is blocked, a backward that another thread starts waits for it.
- A backward inside a backward runs at once, in the worker (``autograd.grad`` in a node, a reentrant checkpoint).
- The worker has the caller's modes of dispatch, gradients, autocast and hooks of saved tensors, because the engine
  takes them along; it has no context variables and thread locals of the caller, and its own settings of dynamo.
- ``set_multithreading_enabled(False)`` runs a backward in the thread that calls it.

Other than on a GPU:

- Everything stands for a tensor on the GPU, scalars on the CPU and the root of the graph included.
- Two backwards that wait for the worker run one after the other. On a GPU the worker alternates between their nodes.
- There are no streams.
- ``torch.accelerator`` names the device. It is not available, so that nobody computes on it.
- Ranks of pools have the worker; programs that a test starts by a command have none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable, graph
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ASKED = "OMNITRAIN_TEST_DEVICE_THREAD"  # environment variable that makes ranks install the worker
NAME = "device_thread"

_run_backward = graph._engine_run_backward


class _Module:
    """``torch.device_thread``: what torch asks of each kind of device."""

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True


class _OnDevice(torch.Tensor):
    """A scalar of the device, without a value."""

    @staticmethod
    def __new__(cls, requires_grad: bool) -> _OnDevice:
        place = torch.device(NAME, 0)
        return torch.Tensor._make_wrapper_subclass(cls, (), device=place, requires_grad=requires_grad)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise AssertionError(f"nothing is computed on the device; found {function}")


class _Node(torch.autograd.Function):
    """Calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return _OnDevice(False)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        ctx.call()
        return None, None


def _run_in_worker(roots: Any, *args: Any, **options: Any) -> Any:
    """``_engine_run_backward`` of torch, in the device's worker."""
    if torch._C._current_graph_task_id() != -1:  # inside a backward
        return _run_backward(roots, *args, **options)
    found: list[Any] = []
    with_graph = torch.is_grad_enabled()

    def call() -> None:
        with torch.set_grad_enabled(with_graph):  # callbacks at the end of a backward have the caller's
            found.append(Variable._execution_engine.run_backward(roots, *args, **options))

    with _disable_current_modes(), torch.enable_grad():
        node, one = _Node.apply(_OnDevice(True), call), _OnDevice(False)
    _run_backward((node,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return found.pop()


def install() -> None:
    """Give this process the worker; before its first backward, because the engine then starts its threads."""
    if graph._engine_run_backward is _run_in_worker:
        return
    _setup_privateuseone_for_python_backend(NAME, _Module, _Hooks())
    torch.autograd._engine_run_backward = graph._engine_run_backward = _run_in_worker


if os.environ.get(ASKED):
    install()
