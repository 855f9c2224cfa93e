"""Modules that carry state along the row (linear attention, short convolutions), run one packed sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.ops.attention import packed, packed_borders


def run_by_segment(model: nn.Module, class_names: Sequence[str]) -> None:
    """Make every module of these classes run each sample of a packed row by itself; otherwise it stays as it is.

    The modules keep their parameters and names; only their class changes, to a subclass of their own.
    """
    for module in model.modules():
        if type(module).__name__ in class_names and not isinstance(module, _Segmented):
            module.__class__ = _segmented_class(type(module))  # type: ignore[arg-type]


class _Segmented:
    """Marks the classes that :func:`run_by_segment` makes."""


@cache
def _segmented_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        alone: Callable[..., Any] = kind.forward
        borders = packed_borders()
        if borders is None:
            return alone(self, *args, **kwargs)
        outputs = []
        for start, stop in pairwise(borders):
            with packed((0, stop - start)):
                part = _cut((args, kwargs), borders[-1], start, stop)
                outputs.append(alone(self, *part[0], **part[1]))
        return _joined(outputs)

    return type(kind.__name__, (_Segmented, kind), {"forward": forward, "__module__": kind.__module__})


def _cut(value: Any, length: int, start: int, stop: int) -> Any:
    """The segment of everything that runs along the row (dim 1 of ``length``); packing arguments are left out."""
    if isinstance(value, Tensor):
        return value[:, start:stop] if value.ndim >= 2 and value.size(1) == length else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(item, length, start, stop) for item in value)
    if isinstance(value, dict):
        return {key: _cut(item, length, start, stop) for key, item in value.items() if key not in _PACKING}
    return value


_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs, dim=1)
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    return first
