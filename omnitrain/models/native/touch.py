"""Which parameters a piece of code reads: seen at every torch call, so bare parameters and frozen ones count, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Values drawn for a tensor on the meta device, which repeat in a larger one: drawing all would take most of the time.
# A prime, so that no row of a matrix equals its neighbours.
_DRAWN = 65_537


class ParameterReads(TorchFunctionMode):
    """Context in which every parameter that enters a computation is noted.

    Looking at a parameter's dtype or device is no reading: only calls that return tensors count. Parameters and buffers
    on the meta device are replaced by small random values for the moment of the call, so that code which depends on
    its inputs' values runs on a model without weights, in the memory of its largest tensor.

    Attributes:
        names: of the parameters read.
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
        given = [value for value in leaves((args, kwargs)) if id(value) in self._names]
        if self._seeds:
            args, kwargs = map_leaves(args, self._off_meta), map_leaves(kwargs, self._off_meta)
        result = func(*args, **kwargs)
        if given and any(isinstance(value, Tensor) for value in leaves(result)):
            self.names |= {self._names[id(value)] for value in given}
        return self._off_meta(result) if self._seeds else result

    def _off_meta(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        seed = self._seeds.get(id(value))
        if seed is None:
            return value
        if not value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(min(value.numel(), _DRAWN), dtype=value.dtype).uniform_(-0.1, 0.1, generator=generator)
        repeats = -(-value.numel() // max(1, drawn.numel()))
        return drawn.repeat(repeats)[: value.numel()].view(value.shape)


def leaves(tree: Any) -> Iterator[Any]:
    """What lies in nested lists, tuples and dicts."""
    if isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    else:
        yield tree


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same nested lists, tuples and dicts, with ``function`` of what lies in them."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(value, function) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(value, function) for value in tree)
    if type(tree) is dict:
        return {key: map_leaves(value, function) for key, value in tree.items()}
    return function(tree)
