"""Which parameters a piece of code reads: seen at every torch call, so bare parameters and frozen ones count, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Random values that all large tensors on the meta device stand on: to write each out at every read would take most of
# the time. Tensors begin this far apart, so no two are equal.
_DRAWN, _APART = 2**24, 1_021
# Below this a tensor has values of its own.
_SMALL = 2**16


class ParameterReads(TorchFunctionMode):
    """Context in which every parameter that enters a computation is noted.

    Looking at a parameter's dtype or device is no reading: only calls that return tensors count. Parameters and buffers
    on the meta device are replaced by small random values for the moment of the call, so that code which depends on
    its inputs' values runs on a model without weights. Large ones are windows onto the same values, and take no memory.

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
            for value in given:
                self.note(self._names[id(value)])
        return self._off_meta(result) if self._seeds else result

    def note(self, name: str) -> None:
        """The parameter of this name enters a computation."""
        self.names.add(name)

    def _off_meta(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        seed = self._seeds.get(id(value))
        if seed is None:
            return value
        return _random(value, seed) if value.is_floating_point() else torch.zeros(value.shape, dtype=value.dtype)


def _random(like: Tensor, seed: int) -> Tensor:
    """Values in [-0.1, 0.1) of the shape and dtype of ``like``, the same for each call with this seed.

    What is written to a large one is seen by others.
    """
    size = like.numel()
    if size <= _SMALL:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(like.shape, dtype=like.dtype).uniform_(-0.1, 0.1, generator=generator)
    values, offset = _shared_values(like.dtype), seed * _APART % (_DRAWN // 4)
    rows, width = like.size(0), size // like.size(0)
    # The rows of a tensor that is larger than the values overlap, each a few values behind the one before.
    step = min(width, (_DRAWN - offset - width) // max(1, rows - 1))
    if step < 1:
        return values.repeat(-(-size // _DRAWN))[:size].view(like.shape)
    return values.as_strided(like.shape, (step, *torch.empty(like.shape[1:], device="meta").stride()), offset)


@lru_cache(maxsize=2)
def _shared_values(dtype: torch.dtype) -> Tensor:
    return torch.empty(_DRAWN).uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(0)).to(dtype)


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


def float_tensors(tree: Any) -> list[Tensor]:
    """The tensors of floats among these."""
    return [value for value in leaves(tree) if isinstance(value, Tensor) and value.is_floating_point()]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same nested lists, tuples and dicts, with ``function`` of what lies in them."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(value, function) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(value, function) for value in tree)
    if type(tree) is dict:
        return {key: map_leaves(value, function) for key, value in tree.items()}
    return function(tree)
