"""A tower whose calls several ranks make together: each runs its blocks over some of the rows.

Hooks on the blocks cut what they are given, whatever the model's code makes before them, and put the whole row
together behind the last one: what comes then (a merger, windows put back in order) sees all rows. Between blocks,
attention alone looks at other rows. It is told by ``cu_seqlens``, an argument of the block, so that recompute needs
nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.ops.attention import RowPart, borders_on

MakePart = Callable[[int, torch.device], RowPart | None]

_BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class SharedTower:
    """The blocks of a component, with hooks that do nothing until :meth:`sharing`."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], part_of: MakePart) -> None:
        """Attach.

        Args:
            model: that has the component.
            parameters: of the component.
            part_of: number of rows of a call, and their device -> this rank's part; None: all of them, on all ranks.
        """
        self._stacks = [_Stack(blocks, beside, part_of) for blocks, beside in _stacks_of(model, set(parameters))]

    @property
    def num_stacks(self) -> int:
        """Stacks of blocks in the component."""
        return len(self._stacks)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """While open, the component's calls are shared; all ranks that share them make the same ones."""
        for stack in self._stacks:
            stack.is_open = True
        try:
            yield
        finally:
            for stack in self._stacks:
                stack.close()


def _stacks_of(model: nn.Module, own: set[nn.Parameter]) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
    """The stacks of blocks whose parameters are ``own``, each with the modules that are called beside it."""
    for parent in model.modules():
        for name, blocks in parent.named_children():
            if isinstance(blocks, nn.ModuleList) and len(blocks) and all(_is_block(block, own) for block in blocks):
                others = [child for other, child in parent.named_children() if other != name]
                yield list(blocks), list(_called(others))


def _is_block(module: nn.Module, own: set[nn.Parameter]) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and own.issuperset(module.parameters())


def _called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if isinstance(module, _CONTAINERS):
            yield from _called(module.children())
        else:
            yield module


class _Stack:
    """One list of blocks, and of the call that runs through it, this rank's part."""

    def __init__(self, blocks: Sequence[nn.Module], beside: Iterable[nn.Module], part_of: MakePart) -> None:
        self.is_open = False
        self._part_of = part_of
        self._part: RowPart | None = None
        self._borders: dict[int, tuple[Tensor, Tensor]] = {}  # of the call, by identity: whole, and of the part
        self._between: Tensor | None = None  # what the last block gave
        self._first = blocks[0]
        self._names = list(inspect.signature(type(blocks[0]).forward).parameters)[1:]
        for block in blocks:
            block.register_forward_pre_hook(self._cut, with_kwargs=True)
        for block in blocks[:-1]:
            block.register_forward_hook(self._note)
        blocks[-1].register_forward_hook(self._put_together)
        for module in beside:
            module.register_forward_pre_hook(self._whole, with_kwargs=True)

    def close(self) -> None:
        self.is_open = False
        self._end()

    def _end(self) -> None:
        self._part, self._between = None, None
        self._borders.clear()

    def _cut(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Of everything with a row per row of the call, this rank's."""
        if not self.is_open:
            return None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if block is self._first:
            hidden = given[self._names[0]]
            self._part = self._part_of(hidden.size(0), hidden.device) if hidden.ndim == 2 else None
        if self._part is None:
            return None
        own = {name: self._of_part(name, value) for name, value in given.items()}
        return tuple(own.pop(name) for name in self._names[: len(args)]), own

    def _of_part(self, name: str, value: Any) -> Any:
        part = self._part
        assert part is not None
        if name in _BORDERS and isinstance(value, Tensor):
            if id(value) not in self._borders:  # one for all blocks, whose values are read once
                self._borders[id(value)] = value, borders_on(value, part.attention)
            return self._borders[id(value)][1]

        def cut(tensor: Tensor) -> Tensor:
            return tensor[part.rows] if tensor.ndim and tensor.size(0) == part.num_tokens else tensor

        return tree_map_only(Tensor, cut, value)

    def _note(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._part is not None:
            self._between = output if isinstance(output, Tensor) else output[0]

    def _whole(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """What is beside the blocks sees the whole row, where it is given what a block gave (deepstack)."""
        if self._part is None or self._between is None:
            return None
        return tree_map_only(Tensor, self._gathered, (args, kwargs))

    def _gathered(self, tensor: Tensor) -> Tensor:
        assert self._part is not None and self._between is not None
        is_same = tensor.data_ptr() == self._between.data_ptr() and tensor.shape == self._between.shape
        return self._part.gather(tensor, 0) if is_same else tensor

    def _put_together(self, block: nn.Module, args: Any, output: Any) -> Any:
        if self._part is None:
            return None
        part, own = self._part, len(self._part.rows)
        self._end()
        return tree_map_only(Tensor, lambda t: part.gather(t, 0) if t.ndim and t.size(0) == own else t, output)
