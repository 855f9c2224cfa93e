"""Record which parameters a piece of code reads, at every torch call; bare and frozen parameters count, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omnitrain.torch_private import tree_iter, tree_map

# All large meta tensors are views of these random values: filling each tensor at every read would take most of the
# time. Views start at different offsets, so no two are equal.
_NUM_VALUES, _OFFSET = 2**24, 1_021
# A tensor up to this size gets its own values.
_SMALL = 2**16


class ParameterReads(TorchFunctionMode):
    """Context that records the ``names`` of all parameters that enter a computation of tensors.

    Parameters and buffers on the meta device are replaced by small random values that take no memory meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in model.named_parameters()}
        tensors = [*model.parameters(), *model.buffers()]
        self._seeds = {id(value): seed for seed, value in enumerate(tensors) if value.is_meta}
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parameters = [value for value in tree_iter((args, kwargs)) if id(value) in self._names]
        if self._seeds:
            args, kwargs = tree_map(self._off_meta, (args, kwargs))
        result = func(*args, **kwargs)
        if parameters and any(isinstance(value, Tensor) for value in tree_iter(result)):
            for value in parameters:
                self.note(self._names[id(value)])
        return self._off_meta(result) if self._seeds else result

    def note(self, name: str) -> None:
        """Record that the parameter ``name`` enters a computation."""
        self.names.add(name)

    def _off_meta(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        seed = self._seeds.get(id(value))
        if seed is None:
            return value
        return _random(value, seed) if value.is_floating_point() else torch.zeros(value.shape, dtype=value.dtype)


def _random(like: Tensor, seed: int) -> Tensor:
    """Values in [-0.1, 0.1), the same for each call with this seed; a write to a large tensor changes other ones."""
    size = like.numel()
    if size <= _SMALL:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(like.shape, dtype=like.dtype).uniform_(-0.1, 0.1, generator=generator)
    values, offset = _shared_values(like.dtype), seed * _OFFSET % (_NUM_VALUES // 4)
    rows, width = like.size(0), size // like.size(0)
    # In a tensor larger than the values, rows overlap: each starts a few values after the previous one.
    step = min(width, (_NUM_VALUES - offset - width) // max(1, rows - 1))
    if step < 1:
        return values.repeat(-(-size // _NUM_VALUES))[:size].view(like.shape)
    return values.as_strided(like.shape, (step, *torch.empty(like.shape[1:], device="meta").stride()), offset)


@lru_cache(maxsize=2)
def _shared_values(dtype: torch.dtype) -> Tensor:
    return torch.empty(_NUM_VALUES).uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(0)).to(dtype)


def float_tensors(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested lists, tuples and dicts."""
    return [value for value in tree_iter(tree) if isinstance(value, Tensor) and value.is_floating_point()]
