"""Where a step would wait for a GPU, and where it would fail on one, found on a CPU.

The host knows a value on a device only when all that is queued there has run. Here the CPU plays the device: what is
moved there, made there, or made of what is there, is marked. Reading a marked value on the host, making a tensor whose
size depends on one, and plain copies to the device are waits. Operations of marked and unmarked tensors fail on a GPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
DEVICE = torch.device("cpu", 0)  # another name than that of the host
SIZED_BY_VALUES = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.equal,
    aten.is_nonzero,
    aten.bincount,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten.copy_, aten._to_copy}
READ_ON_HOST = {"tolist", "numpy", "cpu", "__array__"}  # without an operation that would be seen
COPIED_FROM_HOST = {"tensor", "as_tensor", "new_tensor"}
PACKAGES = ("omnitrain", "transformers")
AROUND = "omnitrain.ops.host_values"  # runs the functions of others


class Device:
    """What is on the device, and where the host waited for it.

    Args:
        there: tensors that are on it from the start.

    Attributes:
        waits: ``MODULE FUNCTION``, the innermost of omnitrain or transformers that waited -> how often.
        mixes: the same and the operation, where tensors of the host and of the device met.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        self.waits: Counter[str] = Counter()
        self.mixes: set[str] = set()
        self.computes = False  # torch's own code makes what it needs there, such as the offsets of bags
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that none gets the address of another
        self.put(there)

    def put(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage

    def has(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._storages

    def wait(self) -> None:
        self.waits[_place()] += 1

    def mix(self, operation: str) -> None:
        self.mixes.add(f"{_place()}: {operation}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield


class _Functions(TorchFunctionMode):
    """What is asked of tensors in Python: copies to the device, and values of it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READ_ON_HOST and self._device.has(args[0]):
            self._device.wait()
        self._device.computes = any(map(self._device.has, tree_leaves((args, kwargs))))
        made = func(*args, **kwargs)
        self._device.computes = False
        if name == "to":
            named = any(isinstance(value, (torch.device, str)) for value in (*args[1:], kwargs.get("device")))
            if named and not self._device.has(args[0]):
                if "non_blocking" not in kwargs:
                    self._device.wait()
                made = made.clone() if made is args[0] else made
                self._device.put([made])
        elif kwargs.get("device") is not None and not self._device.has(made):
            if name in COPIED_FROM_HOST:
                self._device.wait()
            self._device.put([made])
        return made


class _Operations(TorchDispatchMode):
    """What is computed, in the backward too: of what is on the device, on the device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [self._device.has(tensor) for tensor in tensors]
        is_there = any(there)
        elsewhere = [tensor for tensor, has in zip(tensors, there, strict=True) if tensor.ndim and not has]
        if is_there and elsewhere and func.overloadpacket not in COPIES:
            self._device.mix(func.overloadpacket.__name__)
        if is_there and _is_sized_by_values(func, args, kwargs):
            self._device.wait()
        made = func(*args, **kwargs)
        if is_there or (not tensors and (self._device.computes or _is_backward())):
            self._device.put(tree_leaves(made))
        return made


def _place() -> str:
    return place().partition(":")[0]


def place() -> str:
    """``MODULE FUNCTION:LINE``, the innermost of omnitrain or transformers that is running; or `elsewhere`."""
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES and module != AROUND:
            return f"{module} {frame.f_code.co_name}:{line}"
    return "elsewhere"


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _is_sized_by_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func.overloadpacket in INDEXING:
        return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
    if func.overloadpacket is aten.repeat_interleave:
        return func is not aten.repeat_interleave.self_int and kwargs.get("output_size") is None
    return func.overloadpacket in SIZED_BY_VALUES
