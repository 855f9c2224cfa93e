"""A tower whose calls several ranks share: each rank runs the blocks over a slice of the rows.

Hooks slice the inputs of the blocks, whatever the model's code computes before them, and gather the output of the last
block, so later modules (a merger, reordering of windows) see all rows. Between blocks only attention needs other rows.
It finds the slice by ``cu_seqlens``, an argument of the block, so recomputation needs nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.ops.attention.packed_context import SequenceSlice
from omnitrain.ops.attention.spec import offsets_on
from omnitrain.torch_private import tree_map_only

MakeSlice = Callable[[int, torch.device], SequenceSlice | None]

_OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class SharedTower:
    """The blocks of a component, with hooks that do nothing until :meth:`sharing`."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], slice_of: MakeSlice) -> None:
        """``slice_of``: rows of a call, and their device -> this rank's slice; None: all ranks run all rows."""
        self.stacks = [_Stack(blocks, siblings, slice_of) for blocks, siblings in _stacks_of(model, set(parameters))]

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Share the component's calls; all ranks that share them must make the same calls."""
        token = _shared.set(dict.fromkeys(self.stacks))
        try:
            yield
        finally:
            _shared.reset(token)


def _stacks_of(model: nn.Module, parameters: set[nn.Parameter]) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
    """The stacks of blocks with only these parameters, each with its sibling modules."""

    def is_block(module: nn.Module) -> bool:
        return isinstance(module, GradientCheckpointingLayer) and parameters.issuperset(module.parameters())

    for parent in model.modules():
        for name, blocks in parent.named_children():
            if isinstance(blocks, nn.ModuleList) and len(blocks) and all(map(is_block, blocks)):
                others = [child for other, child in parent.named_children() if other != name]
                yield list(blocks), list(_called(others))


def _called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from _called(module.children()) if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else (module,)


@dataclass
class _SharedCall:
    """A call of a stack that ranks share."""

    slice: SequenceSlice  # this rank's slice
    offsets: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # id of the call's -> it, and the slice's
    between: Tensor | None = None  # output of the latest block


# The stacks whose calls are shared in this thread -> the running call; None: none is running, or it is not shared.
_shared: ContextVar[dict[_Stack, _SharedCall | None] | None] = ContextVar("shared_towers", default=None)


class _Stack:
    """One list of blocks."""

    def __init__(self, blocks: Sequence[nn.Module], siblings: Iterable[nn.Module], slice_of: MakeSlice) -> None:
        self._slice_of = slice_of
        self._first = blocks[0]
        self._names = list(inspect.signature(type(blocks[0]).forward).parameters)[1:]
        for block in blocks:
            block.register_forward_pre_hook(self._cut, with_kwargs=True)
        for block in blocks[:-1]:
            block.register_forward_hook(self._keep_output)
        blocks[-1].register_forward_hook(self._gather_output)
        for module in siblings:
            module.register_forward_pre_hook(self._gather_inputs, with_kwargs=True)

    def _running(self) -> _SharedCall | None:
        return (_shared.get() or {}).get(self)

    def _cut(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Slice all arguments with one row per row of the call."""
        shared = _shared.get()
        if shared is None or self not in shared:
            return None
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if block is self._first:
            hidden = arguments[self._names[0]]
            found = self._slice_of(hidden.size(0), hidden.device) if hidden.ndim == 2 else None
            shared[self] = None if found is None else _SharedCall(found)
        call = shared[self]
        if call is None:
            return None
        sliced = {name: self._sliced(call, name, value) for name, value in arguments.items()}
        return tuple(sliced.pop(name) for name in self._names[: len(args)]), sliced

    @staticmethod
    def _sliced(call: _SharedCall, name: str, value: Any) -> Any:
        sequence_slice = call.slice
        if name in _OFFSETS and isinstance(value, Tensor):
            if id(value) not in call.offsets:  # computed once for all blocks: it reads the values
                call.offsets[id(value)] = value, offsets_on(value, sequence_slice.attention)
            return call.offsets[id(value)][1]

        def cut(tensor: Tensor) -> Tensor:
            is_whole = tensor.ndim and tensor.size(0) == sequence_slice.num_tokens
            return tensor[sequence_slice.positions] if is_whole else tensor

        return tree_map_only(Tensor, cut, value)

    def _keep_output(self, block: nn.Module, args: Any, output: Any) -> None:
        call = self._running()
        if call is not None:
            call.between = output if isinstance(output, Tensor) else output[0]

    def _gather_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Gather the output of a block that a sibling of the blocks takes (deepstack)."""
        call = self._running()
        if call is None or call.between is None:
            return None
        sequence_slice, between = call.slice, call.between

        def gathered(tensor: Tensor) -> Tensor:
            is_same = tensor.data_ptr() == between.data_ptr() and tensor.shape == between.shape
            return sequence_slice.gather(tensor, 0) if is_same else tensor

        return tree_map_only(Tensor, gathered, (args, kwargs))

    def _gather_output(self, block: nn.Module, args: Any, output: Any) -> Any:
        call, shared = self._running(), _shared.get()
        if call is None or shared is None:
            return None
        shared[self] = None
        sequence_slice, num_rows = call.slice, len(call.slice.positions)

        def gathered(tensor: Tensor) -> Tensor:
            return sequence_slice.gather(tensor, 0) if tensor.ndim and tensor.size(0) == num_rows else tensor

        return tree_map_only(Tensor, gathered, output)
