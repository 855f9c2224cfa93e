"""``StoredTensor``: a tensor whose elements still lie in files, in the place of a model's parameter.

transformers loads a model with such tensors as with others: it renames them, stacks experts, splits, transposes and
casts. These operations are recorded (:mod:`.stored_values`), and all others while transformers loads, or within
``operations_recorded``. FSDP and tensor parallelism slice the tensors; what they copy to memory is read then, and
nothing else. Any other operation reads its inputs whole; a ``StoredTensor`` that is written to keeps it in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import mxfp4

from omnitrain.models.hf.stored_values import (
    FILES,
    Computed,
    Concatenated,
    InFile,
    InMemory,
    Reshaped,
    StoredValue,
    View,
    cast,
    leaves_of,
    read,
    whole_of,
)
from omnitrain.torch_private import (
    TO_COPY,
    UNSAFE_VIEW,
    DisableTorchFunctionSubclass,
    buffers_of,
    make_wrapper_subclass,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from omnitrain.transformers_private import loading_through

aten = torch.ops.aten
_DATA: Any = torch.Tensor.data
_SET_DATA = _DATA.__set__
_records_all: ContextVar[bool] = ContextVar("_records_all", default=False)
_leaves_in_files: ContextVar[bool] = ContextVar("_leaves_in_files", default=False)


class StoredTensor(Tensor):
    """A tensor whose elements lie in files; ``value`` says how it is made of them."""

    value: StoredValue

    @staticmethod
    def __new__(cls, value: StoredValue, device: torch.device | str = "cpu") -> StoredTensor:
        """Make a tensor of ``value`` that says it is on ``device``, where a copy of it will be."""
        return make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=torch.device(device))

    def __init__(self, value: StoredValue, device: torch.device | str = "cpu") -> None:
        self.value = value

    def __repr__(self) -> str:  # type: ignore[override]  # torch's stub has a keyword without a name
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        copied = StoredTensor(self.value, self.device).requires_grad_(self.requires_grad)
        vars(copied).update({name: kept for name, kept in vars(self).items() if name != "value"})
        return memo.setdefault(id(self), copied)

    @property
    def is_in_files(self) -> bool:
        """Whether no part of it is in memory, so that it can be read on another rank."""
        return not any(isinstance(leaf, InMemory) for leaf in leaves_of(self.value))

    def read(self) -> Tensor:
        """Return all of it in memory, on its device."""
        return read(self.value).to(self.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if func == _SET_DATA:
                return _set_data(*args)
            return func(*args, **(kwargs or {}))

    # torch's stub describes an instance's method.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _RECORDED:
            recorded = _RECORDED[func](*args, **kwargs)
            if recorded is not NotImplemented:
                return recorded
        if func in _WITHOUT_VALUES:
            return func(*tree_map_only(StoredTensor, _unwritten, args), **kwargs)
        if _records_all.get():
            # An operation that cannot be recorded, or has no shape on the meta device, is computed below.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                return _computed(func, args, kwargs)
        return _compute(func, args, kwargs)


def stored_tensors(files: Sequence[str]) -> dict[str, StoredTensor]:
    """Return name -> tensor, for all tensors of some files; their values are not read."""
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in list(opened.keys()):
                found = opened.get_slice(name)[...]  # a view of mapped memory; nothing is read yet
                tensors[name] = StoredTensor(InFile(file, name, tuple(found.shape), found.dtype))
    return tensors


@contextmanager
def operations_recorded() -> Iterator[None]:
    """Within this context, operations on a ``StoredTensor`` that do not write to it compute only when it is read."""
    recording = _records_all.set(True)
    try:
        yield
    finally:
        _records_all.reset(recording)


@contextmanager
def weights_left_in_files() -> Iterator[None]:
    """Within this context, transformers loads safetensors files into parameters that are ``StoredTensor``."""

    def load_stored(
        load: Any,
        model: PreTrainedModel,
        state_dict: dict[str, Tensor] | None,
        files: list[str] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if state_dict is not None or not files or not all(file.endswith(".safetensors") for file in files):
            return load(model, state_dict, files, *args, **kwargs)
        with operations_recorded():
            loaded = load(model, stored_tensors(files), files, *args, **kwargs)
        _read_buffers(model)
        return loaded

    token = _leaves_in_files.set(True)
    dequantize = mxfp4.convert_moe_packed_tensors
    mxfp4.convert_moe_packed_tensors = _recorded_for_each(dequantize)
    try:
        with loading_through(load_stored):
            yield
    finally:
        mxfp4.convert_moe_packed_tensors = dequantize
        _leaves_in_files.reset(token)


def _recorded_for_each(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Record calls of a function that writes to memory of its own; it treats each entry of the first dim alone."""
    name = f"{function.__module__}:{function.__name__}"

    @wraps(function)
    def recorded(*tensors: Tensor, **kwargs: Any) -> Tensor:
        if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
            return function(*tensors, **kwargs)
        first = function(*(torch.empty_like(tensor[:1], device="meta") for tensor in tensors), **kwargs)
        of_experts = zip(*(tensor.split(1) for tensor in tensors), strict=True)
        arguments = [(tuple(tensor.value for tensor in of_expert), kwargs) for of_expert in of_experts]
        made = (StoredTensor(Computed(name, of_expert, None, first), tensors[0].device) for of_expert in arguments)
        return torch.cat(tuple(made))

    return recorded


def read_or_left_in_file(file: Path) -> Mapping[str, Tensor]:
    """Return name -> tensor of a safetensors file: inside :func:`weights_left_in_files` each a ``StoredTensor``."""
    return stored_tensors([str(file)]) if _leaves_in_files.get() else load_file(file)


def replace_value(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter another value, in memory or in files, for all that refer to it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))


def read_weights(module: nn.Module) -> None:
    """Read the parameters that are left in files; inside :func:`weights_left_in_files` they stay there."""
    if _leaves_in_files.get():
        return
    for parameter in module.parameters():
        if isinstance(parameter, StoredTensor):
            replace_value(parameter, parameter.read())
    FILES.close()


def _read_buffers(model: nn.Module) -> None:
    """Read the buffers: all ranks keep them whole."""
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            if isinstance(buffer, StoredTensor):
                buffers_of(module)[name] = read = buffer.read()
                # transformers marks what it has loaded, and draws the rest anew.
                vars(read).update({key: mark for key, mark in vars(buffer).items() if key != "value"})


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """Do ``tensor.data = data`` where one of the two is a ``StoredTensor``."""
    if isinstance(tensor, StoredTensor) and isinstance(data, StoredTensor):
        _SET_DATA(tensor, data)
        tensor.value = data.value
    else:
        replace_value(tensor, data)


def _unwritten(tensor: StoredTensor, device: torch.device | str | None = None) -> Tensor:
    """A tensor like it; its memory is not written, and so not used."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Record any operation by shapes of the meta device; NotImplementedError: it writes, or gives more than tensors."""
    if any(map(_is_written, schema_of(func).arguments)):
        raise NotImplementedError
    args, kwargs = tree_map_only(
        Tensor, lambda t: t if isinstance(t, StoredTensor) else StoredTensor(InMemory(t)), (args, kwargs)
    )
    device = next(t.device for t in tree_leaves((args, kwargs)) if isinstance(t, StoredTensor))
    shapes = tree_map_only(StoredTensor, partial(_unwritten, device="meta"), (args, kwargs))
    shaped = func(*shapes[0], **shapes[1])
    of_args = tree_map_only(StoredTensor, lambda t: t.value, (args, kwargs))

    def result(like: Any, index: int | None) -> StoredTensor:
        if not isinstance(like, Tensor):
            raise NotImplementedError
        return StoredTensor(Computed(str(func), of_args, index, like), device)

    if isinstance(shaped, (tuple, list)):
        return type(shaped)(result(like, index) for index, like in enumerate(shaped))
    return result(shaped, None)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on inputs that are read whole; a tensor that it writes to keeps the result."""
    arguments = schema_of(func).arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    into = [given.get(argument.name) for argument in arguments if _is_written(argument)]
    written = [tensor for tensor in into if isinstance(tensor, StoredTensor)]
    plain = {
        tensor: tensor.read() for tensor in {t for t in tree_leaves((args, kwargs)) if isinstance(t, StoredTensor)}
    }
    plain_args, plain_kwargs = tree_map_only(StoredTensor, plain.__getitem__, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for tensor in written:
        tensor.value = InMemory(plain[tensor])
    return next((tensor for tensor in written if plain[tensor] is result), result)


def _same(tensor: StoredTensor, **kwargs: Any) -> StoredTensor:
    return StoredTensor(tensor.value, tensor.device)


def _view(tensor: StoredTensor, dims: Iterable[int | None], ranges: dict[int, tuple[int, int]] | None = None) -> Any:
    return StoredTensor(View(tensor.value, tuple(dims), ranges or {}), tensor.device)


def _copied_to(
    tensor: StoredTensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **kwargs: Any
) -> Any:
    if device is not None and torch.device(device).type == "meta":
        return NotImplemented
    return StoredTensor(cast(tensor.value, dtype or tensor.dtype), device or tensor.device)


def _sliced(tensor: StoredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(tensor.size(dim))
    return _view(tensor, range(tensor.ndim), {dim % tensor.ndim: (first, max(last - first, 0))})


def _split(tensor: StoredTensor, sizes: int | Sequence[int], dim: int = 0) -> list[StoredTensor]:
    size = tensor.size(dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)] if size else [0]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_sliced(tensor, dim, start, start + length) for start, length in zip(starts, sizes, strict=True)]


def _selected(tensor: StoredTensor, dim: int, index: int) -> StoredTensor:
    dim %= tensor.ndim
    others = (other for other in range(tensor.ndim) if other != dim)
    return _view(tensor, others, {dim: (index % tensor.size(dim), 1)})


def _unsqueezed(tensor: StoredTensor, dim: int) -> StoredTensor:
    dim %= tensor.ndim + 1
    return _view(tensor, (*range(dim), None, *range(dim, tensor.ndim)))


def _squeezed(tensor: StoredTensor, dim: int) -> StoredTensor:
    return _selected(tensor, dim, 0) if tensor.ndim and tensor.size(dim) == 1 else _same(tensor)


def _permuted(tensor: StoredTensor, dims: Sequence[int]) -> StoredTensor:
    return _view(tensor, (dim % tensor.ndim for dim in dims))


def _transposed(tensor: StoredTensor, first: int = 0, second: int = 1) -> StoredTensor:
    dims = list(range(tensor.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(tensor, dims)


def _reshaped(tensor: StoredTensor, shape: Sequence[int]) -> StoredTensor:
    found = torch.empty(tensor.shape, device="meta").view(shape).shape
    return StoredTensor(Reshaped(tensor.value, tuple(found)), tensor.device)


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    values = tuple(tensor.value for tensor in tensors if isinstance(tensor, StoredTensor))
    first = tensors[0]
    if len(values) < len(tensors) or any((t.dtype, t.ndim) != (first.dtype, first.ndim) for t in tensors):
        return NotImplemented
    return StoredTensor(Concatenated(values, dim % first.ndim), first.device)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
        return NotImplemented
    dim %= tensors[0].ndim + 1
    return _concatenated([aten.unsqueeze.default(tensor, dim) for tensor in tensors], dim)


def _copied_from(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if isinstance(target, StoredTensor) or not isinstance(source, StoredTensor) or target.shape != source.shape:
        return NotImplemented
    source.value.write_to(target, whole_of(source.value.shape))
    return target


_RECORDED: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    TO_COPY: _copied_to,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _selected,
    aten.unbind.int: lambda tensor, dim=0: tuple(_selected(tensor, dim, i) for i in range(tensor.size(dim))),
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _squeezed,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: _transposed,
    aten.view.default: _reshaped,
    UNSAFE_VIEW: _reshaped,
    aten.cat.default: _concatenated,
    aten.stack.default: _stacked,
    aten.copy_.default: _copied_from,
}
# Their results depend on shapes alone.
_WITHOUT_VALUES = {
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    aten.new_empty_strided.default,
}
