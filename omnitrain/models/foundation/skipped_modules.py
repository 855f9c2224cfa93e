"""Modules that a forward calls for some samples only: where it leaves them out, they are called on nothing.

Experts for image tokens are an example. Their parameters belong to units that all ranks gather and reduce together,
and their rows may travel between ranks, so each rank must call them, whatever its samples are. A call on empty tensors
computes nothing, and gives gradients of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map
from transformers import PreTrainedModel

from omnitrain.models.components.contract import SkippedModule
from omnitrain.recipe.globs import any_layer

_ATTRIBUTE = "_calls_what_is_left_out"


def call_what_is_left_out(model: nn.Module, found: Sequence[SkippedModule]) -> None:
    """From now on, what a forward of ``model`` leaves out is called on nothing. To do it twice is to do it once.

    Args:
        model: changed in place, by hooks; classes, parameters and names stay.
        found: in the order in which a forward that leaves nothing out calls them.
    """
    modules = dict(model.named_modules())
    places = {kind.module: (place, kind) for place, kind in enumerate(found)}
    parents: dict[str, list[tuple[int, str, SkippedModule]]] = {}
    for name in modules:
        if (known := places.get(any_layer(name))) is not None:
            place, kind = known
            parents.setdefault(parent_of(name, kind), []).append((place, name, kind))
    for parent, children in parents.items():
        if not hasattr(modules[parent], _ATTRIBUTE):
            ordered = [(modules[name], kind) for _, name, kind in sorted(children, key=lambda child: child[0])]
            calls = _Calls(modules[parent], ordered)
            setattr(modules[parent], _ATTRIBUTE, calls)
            if parent == "" and isinstance(model, PreTrainedModel):
                calls.end_before(model.get_output_embeddings())


def parent_of(name: str, kind: SkippedModule) -> str:
    """The name of the module that calls the one of this name, or leaves it out."""
    below = kind.module.count(".") - kind.parent.count(".") if kind.parent else kind.module.count(".") + 1
    return ".".join(name.split(".")[:-below])


class _Calls:
    """The calls of some modules within a forward of their parent.

    They are called in one order on all ranks: before a module runs, those before it that were left out do.
    """

    def __init__(self, parent: nn.Module, children: Sequence[tuple[nn.Module, SkippedModule]]) -> None:
        self._children = children
        self._next = 0
        self._near: Tensor | None = None
        self._nothing: list[Tensor] = []
        self._is_open = self._is_own = False
        parent.register_forward_pre_hook(self._begin, with_kwargs=True)
        parent.register_forward_hook(self._end)
        for child, _ in children:
            child.register_forward_pre_hook(self._arrive)

    def end_before(self, head: nn.Module) -> None:
        """A loss is computed in the language-model head: what a model returns behind it, no loss reads."""
        head.register_forward_pre_hook(self._reach)

    def _begin(self, parent: nn.Module, args: Any, kwargs: Any) -> None:
        self._next, self._nothing, self._is_open = 0, [], True
        self._near = next(_floating((args, kwargs)), None)

    def _arrive(self, child: nn.Module, args: Any) -> None:
        if self._is_open and not self._is_own:
            place = next(place for place, (known, _) in enumerate(self._children) if known is child)
            self._catch_up(place)
            self._next = max(self._next, place + 1)

    def _reach(self, head: nn.Module, args: Any) -> Any:
        if not self._is_open:
            return None
        self._catch_up(len(self._children))
        return self._tied(args)

    def _end(self, parent: nn.Module, args: Any, output: Any) -> Any:
        self._catch_up(len(self._children))
        self._near, self._is_open = None, False
        return self._tied(output)

    def _tied(self, tree: Any) -> Any:
        nothing, self._nothing = self._nothing, []
        first = next(_floating(tree))
        tied = _Tied.apply(first, *nothing)
        return tree_map(lambda value: tied if value is first else value, tree)

    def _catch_up(self, place: int) -> None:
        for child, kind in self._children[self._next : place]:
            self._is_own = True
            empty = self._empty(child)
            try:
                output = child(*(empty.view(sizes) for sizes in kind.takes))
            finally:
                self._is_own = False
            self._nothing.append(next(_floating(output)))  # its first result is what a forward goes on with
        self._next = max(self._next, place)

    def _empty(self, child: nn.Module) -> Tensor:
        """Nothing of the rows that the parent was given; where it was given none, of the child's own dtype."""
        if self._near is not None:
            return self._near.flatten()[:0]
        weight = next(child.parameters())
        return torch.empty(0, dtype=weight.dtype, device=weight.device)


class _Tied(torch.autograd.Function):
    """``output``, on which the calls on nothing hang.

    It saves a tensor, on ranks that left nothing out, too: blocks are recomputed when the first saved tensor is asked
    for, and that must be at the same place among the units that gather their parameters on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *nothing: Tensor) -> Tensor:
        ctx.save_for_backward(output.new_empty(0), *nothing)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        _, *nothing = ctx.saved_tensors
        return gradients[0], *(torch.zeros_like(part) for part in nothing)


def _floating(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())
