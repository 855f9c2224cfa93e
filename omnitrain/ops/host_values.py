"""Values of integer tensors on a device that the host knows, so that code of models reads them without waiting.

What the host sent to a device (ids, grids, positions) it knows, and so all that is computed of these alone. Inside
:func:`reading_on_host`, a read of such a tensor asks the host; a tensor whose size depends on such values is made on
the host and sent; an index by such a mask becomes one by positions, whose backward does not wait either. The host
computes a value only when it is read, by the function that the device ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from omnitrain.torch_private import innermost_function_mode, version_of, without_innermost_function_mode

_VALUES = "_values_on_host"
_MOST = 2**20  # elements that the host computes again
_READS = {"tolist", "item", "__bool__", "__int__", "__index__", "__format__", "equal", "cpu"}
_SIZED = {"repeat_interleave", "nonzero", "unique_consecutive", "arange"}
_MADE = {"tensor", "as_tensor"}
_OF_SIZES = {"new_zeros", "new_ones", "new_empty", "new_full"}
_INDEXED = {"__getitem__", "__setitem__"}
_RANDOM = {"randint_like"}  # the host would draw other numbers


class _Values:
    """Values of a tensor, computed when they are first asked for."""

    def __init__(self, version: int, compute: Callable[[], Tensor]) -> None:
        self.version = version  # of the tensor that has them
        self._compute: Callable[[], Tensor] | None = compute
        self._values: Tensor | None = None

    def get(self) -> Tensor:
        if self._compute is not None:
            self._values, self._compute = self._compute(), None
        assert self._values is not None
        return self._values


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device``. A blocking copy to a GPU would wait for all its queued work."""
    there = tensor.to(device, non_blocking=device.type == "cuda")
    return there if there is tensor else remember(there, tensor)


def remember(tensor: Tensor, values: Tensor) -> Tensor:
    """Return ``tensor``, and remember that it has the integers ``values`` of the host."""
    if _is_exact(values) and not tensor.is_inference():
        setattr(tensor, _VALUES, _Values(version_of(tensor), lambda: values))
    return tensor


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor, in host memory; None: the host does not know them."""
    known = _known(tensor)
    return None if known is None else known.get()


def rows_of(tensor: Tensor, first: int, number: int) -> Tensor:
    """Return ``number`` rows of a tensor from ``first`` on; what the host knows of the tensor, it knows of them."""
    rows, values = tensor.narrow(0, first, number), values_of(tensor)
    return rows if values is None else remember(rows, values.narrow(0, first, number))


def reading_on_host(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which known values of tensors on ``device`` are read on the host."""
    return _ReadsOnHost(device) if device != torch.device("cpu") else nullcontext()


def reading_nothing() -> AbstractContextManager[Any]:
    """Return a context inside of :func:`reading_on_host` without it: torch.compile makes other code for each mode."""
    is_inside = isinstance(innermost_function_mode(), _ReadsOnHost)
    return without_innermost_function_mode() if is_inside else nullcontext()


def _known(value: Any) -> _Values | None:
    known: _Values | None = getattr(value, _VALUES, None)
    return known if known is not None and known.version == version_of(value) else None


def _is_exact(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_inference())


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


def _held(value: Any) -> Any:
    """An argument with the values that the host knows now, in place of tensors on the device."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_held, value))
    return _known(value) if isinstance(value, Tensor) else value


def _got(held: Any) -> Any:
    """The argument for the host."""
    if isinstance(held, (list, tuple)):
        return type(held)(map(_got, held))
    if isinstance(held, torch.device):
        return torch.device("cpu")
    return held.get() if isinstance(held, _Values) else held


class _ReadsOnHost(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if torch.compiler.is_compiling() or name == "__get__":
            return func(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        known = [_known(tensor) is not None for tensor in tensors]
        if tensors and all(known):
            return self._of_known(func, name, args, kwargs)
        if name in _MADE and kwargs.get("device") is not None:
            return self._sent(func(*args, **kwargs | {"device": None}))
        if name in _INDEXED and any(known):
            args = (args[0], self._positions(args[1]), *args[2:])
        elif name in _OF_SIZES and any(known):
            args = (args[0], *map(_number, args[1:]))
        return func(*args, **kwargs)

    def _of_known(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        held, named = _held(args), {key: _held(value) for key, value in kwargs.items() if key != "device"}

        def again() -> Any:
            return func(*_got(held), **{key: _got(value) for key, value in named.items()})

        if name in _READS:
            found = again()
            return found.clone() if isinstance(found, Tensor) else found
        if name in _SIZED or (name == "__getitem__" and _has_masks(args[1])):
            return self._sent(again())
        made = func(*args, **kwargs)
        if name in _RANDOM:
            return made
        if isinstance(made, Tensor):
            self._remember(made, again)
        elif isinstance(made, (list, tuple)):
            for index, one in enumerate(made):
                self._remember(one, partial(_piece, again, index))
        return made

    def _remember(self, made: Any, compute: Callable[[], Tensor]) -> None:
        """``made`` may be an argument, which knows its values, or that was changed in place."""
        is_new = isinstance(made, Tensor) and not hasattr(made, _VALUES)
        if is_new and _is_exact(made) and made.numel() <= _MOST:
            setattr(made, _VALUES, _Values(version_of(made), compute))

    def _sent(self, values: Tensor) -> Tensor:
        return to_device(values, self._device)

    def _positions(self, index: Any) -> Any:
        """An index with positions in place of known masks."""
        if isinstance(index, Tensor):
            index = (index,)
        if not isinstance(index, tuple):
            return index
        found: list[Any] = []
        for one in index:
            values = values_of(one) if isinstance(one, Tensor) and one.dtype is torch.bool else None
            found += [one] if values is None else map(self._sent, values.nonzero(as_tuple=True))
        return tuple(found)


def _piece(compute: Callable[[], Any], index: int) -> Tensor:
    piece: Tensor = compute()[index]
    return piece


def _number(size: Any) -> Any:
    """A size, or sizes, as numbers, if the host knows them."""
    if isinstance(size, (list, tuple)):
        return type(size)(map(_number, size))
    values = values_of(size) if isinstance(size, Tensor) else None
    return size if values is None else values.item()


def _has_masks(index: Any) -> bool:
    return any(one.dtype is torch.bool for one in _tensors([index]))
