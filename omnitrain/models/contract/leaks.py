"""Which module does not keep the samples of a packed row apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.models.discovery import float_tensors, raise_if_ours
from omnitrain.models.foundation.recurrent_segments import cut_rows

# Relative to the largest value of a tensor: rounding stays below, what another sample or place does is above.
_SAME = 1e-4

_Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def first_leak(
    model: nn.Module, alone: Callable[[], Any], packed: Callable[[], Any], start: int, stop: int, length: int
) -> str | None:
    """Name of the module that treats a sample beside another one differently from the sample alone.

    It is the first that is given the same and returns something else, so inner modules come before outer ones. Where
    the model fails on the packed row, it is the innermost module that was running.

    Args:
        model: its modules are watched.
        alone: runs the model on the sample.
        packed: runs it on a row of ``length`` tokens, of which the sample's are those from ``start`` to ``stop``.
        start: first row of the sample in the packed row.
        stop: behind its last row.
        length: of the packed row.

    Returns:
        None where no module differs whose rows can be told.
    """
    watch = _Watch(model)
    expected = watch.calls(alone, stop - start, 0, stop - start)
    try:
        got = watch.calls(packed, length, start, stop)
    except Exception as error:  # a foreign forward
        raise_if_ours(error)
        return watch.running[-1] if watch.running else None
    for key, (inputs, outputs) in expected.items():
        other_inputs, other_outputs = got.get(key, ([], []))
        if inputs and outputs and _equal(inputs, other_inputs) and not _equal(outputs, other_outputs):
            return key[0]
    return None


class _Watch:
    """Notes the rows that go in and out of every module.

    Attributes:
        running: names of the modules that were called and have not returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running: list[str] = []

    @torch.no_grad()
    def calls(self, run: Callable[[], Any], length: int, start: int, stop: int) -> _Calls:
        """``(name, number of the call)`` -> rows from ``start`` to ``stop``, in the order in which calls return."""
        seen: _Calls = {}
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name:
                    noting = self._noting(name, seen, length, start, stop)
                    hooks.enter_context(
                        module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
                    )
                    hooks.enter_context(module.register_forward_hook(noting, with_kwargs=True))
            run()
        return seen

    def _noting(self, name: str, seen: _Calls, length: int, start: int, stop: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.running.remove(name)
            number = sum(1 for other, _ in seen if other == name)
            inputs, outputs = (list(_rows(value, length, start, stop)) for value in ((args, kwargs), output))
            seen[name, number] = (inputs, outputs)

        return hook


def _rows(value: Any, length: int, start: int, stop: int) -> Iterator[Tensor]:
    for tensor in float_tensors(cut_rows(value, length, start, stop)):
        if stop - start in tensor.shape[1:]:
            yield tensor.clone()


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=_SAME * float(a.abs().max()))
        for a, b in zip(one, other, strict=True)
    )
