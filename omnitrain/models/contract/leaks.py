"""Which module cannot keep the samples of a packed row apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def first_leak(model: nn.Module, run: Callable[[int], Any], start: int, length: int) -> str | None:
    """Name of the module that lets other samples into the rows from ``start`` on, or fails on a packed row.

    It is the first whose input from ``start`` on is the same on both rows and whose output there is not; where the
    model raises, the innermost one that was running. None: no module with rows ``[1, T, n]`` does either.

    Args:
        model: its modules are watched.
        run: ``run(0)`` and ``run(1)`` run the model on two packed rows that differ before ``start`` only.
        start: first row of the sample that is the same in both.
        length: of the rows, tokens.
    """
    seen: list[list[tuple[str, list[Tensor], list[Tensor]]]] = []
    for variant in (0, 1):
        calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
        running: list[str] = []
        handles = []
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(_starting(name, running), with_kwargs=True))
                recording = _recording(name, calls, running, start, length)
                handles.append(module.register_forward_hook(recording, with_kwargs=True))
        try:
            with torch.no_grad():
                run(variant)
        except Exception:
            return running[-1] if running else None
        finally:
            for handle in handles:
                handle.remove()
        seen.append(calls)
    for (name, inputs, outputs), (_, other_inputs, other_outputs) in zip(*seen, strict=False):
        if inputs and outputs and _equal(inputs, other_inputs) and not _equal(outputs, other_outputs):
            return name
    return None


def _starting(name: str, running: list[str]) -> Callable[..., None]:
    return lambda module, args, kwargs: running.append(name)


def _recording(name: str, calls: list[Any], running: list[str], start: int, length: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.remove(name)
        rows = [list(_rows(value, start, length)) for value in ((args, kwargs), output)]
        calls.append((name, *rows))

    return hook


def _rows(value: Any, start: int, length: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim >= 3 and value.size(1) == length:
            yield value[:, start:].clone()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _rows(item, start, length)
    elif isinstance(value, dict):
        yield from _rows(list(value.values()), start, length)


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    scale = max((float(tensor.abs().max()) for tensor in one if tensor.numel()), default=1.0)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-6 * scale) for a, b in zip(one, other, strict=True)
    )
