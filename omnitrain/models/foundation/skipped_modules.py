"""Call modules that a forward skips for some samples, such as experts for image tokens, on empty tensors.

All ranks gather and reduce the FSDP units of their parameters together, and their rows may move between ranks, so each
rank must call them, whatever its samples are. A call on empty tensors gives gradients of zeros; ``ZerosInStep`` removes
them where no sample of a step reads the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.models.components.contract import SkippedModule
from omnitrain.models.foundation.zeros_in_step import with_zeros_for
from omnitrain.recipe.globs import any_layer
from omnitrain.torch_private import tree_iter, tree_map

_ATTRIBUTE = "_calls_skipped_modules"


def call_skipped_modules(model: nn.Module, found: Sequence[SkippedModule]) -> list[SkippedCalls]:
    """Let every forward of ``model`` call the modules ``found``, which it skips, on empty tensors. Idempotent.

    They are in the order of a forward that skips none. Returns the calls of each parent.
    """
    modules = dict(model.named_modules())
    order = {skipped.module: (index, skipped) for index, skipped in enumerate(found)}
    parents: dict[str, list[tuple[int, str, SkippedModule]]] = {}
    for name in modules:
        if (entry := order.get(any_layer(name))) is not None:
            index, skipped = entry
            # The parent's name is as many levels above as its pattern.
            below = skipped.module.count(".") - (skipped.parent.count(".") if skipped.parent else -1)
            parents.setdefault(".".join(name.split(".")[:-below]), []).append((index, name, skipped))
    for parent, children in parents.items():
        if not hasattr(modules[parent], _ATTRIBUTE):
            ordered = [(modules[name], skipped) for _, name, skipped in sorted(children, key=lambda child: child[0])]
            calls = SkippedCalls(modules[parent], ordered)
            setattr(modules[parent], _ATTRIBUTE, calls)
            if parent == "" and isinstance(model, PreTrainedModel):  # no loss reads outputs after the head
                model.get_output_embeddings().register_forward_pre_hook(calls.end_before_head)
    return [getattr(modules[parent], _ATTRIBUTE) for parent in parents]


@dataclass
class _Forward:
    """A forward of a parent."""

    input: Tensor | None  # a floating-point input of the parent
    next: int = 0  # index of the next child in order
    outputs: list[Tensor] = field(default_factory=list)  # of calls, that are not yet connected to the graph
    is_calling: bool = False  # whether a child is being called on empty tensors
    has_ended: bool = False  # whether all calls are made and connected to the input of the language-model head


# The running forwards of parents in this thread: a backward may recompute a parent while another forward of it runs.
_running: ContextVar[Mapping[SkippedCalls, _Forward]] = ContextVar("skipped_modules", default=MappingProxyType({}))


class SkippedCalls:
    """Calls of skipped ``modules`` in their parent's forward, in one order on all ranks; ``read``: those not empty."""

    def __init__(self, parent: nn.Module, children: Sequence[tuple[nn.Module, SkippedModule]]) -> None:
        self._children = children
        self.modules = tuple(module for module, _ in children)
        self.read = set[nn.Module]()
        parent.register_forward_pre_hook(self._begin, with_kwargs=True)
        parent.register_forward_hook(self._end)
        parent.register_forward_hook(self._close, always_call=True)  # after an error, too
        for child, _ in children:
            child.register_forward_pre_hook(self._arrive)
            child.register_forward_hook(self._leave)

    def parameters_by_key(self) -> dict[nn.Module, Iterable[nn.Parameter]]:
        """Return module -> its parameters."""
        return {module: list(module.parameters()) for module in self.modules}

    def _begin(self, parent: nn.Module, args: Any, kwargs: Any) -> None:
        _running.set({**_running.get(), self: _Forward(next(_floating((args, kwargs)), None))})

    def _arrive(self, child: nn.Module, args: Any) -> None:
        running = _running.get().get(self)
        if running is not None and running.is_calling:
            return
        self.read.add(child)
        if running is not None:
            index = self.modules.index(child)
            self._catch_up(running, index)
            running.next = max(running.next, index + 1)

    def _leave(self, child: nn.Module, args: Any, output: Any) -> None:
        """Connect real outputs, too: a pipeline stage may drop them, and its other ranks have gradients of zero."""
        running = _running.get().get(self)
        if running is not None:
            running.outputs.append(next(_floating(output)))  # a forward uses the first result

    def end_before_head(self, head: nn.Module, args: Any) -> Any:
        """Make the remaining calls, as a hook."""
        running = _running.get().get(self)
        if running is None:
            return None
        self._catch_up(running, len(self._children))
        running.has_ended = True
        return self._tied(running, args)

    def _end(self, parent: nn.Module, args: Any, output: Any) -> Any:
        running = _running.get()[self]
        if running.has_ended:
            return None  # FSDP's hooks must be on the tensor that the loss reads
        self._catch_up(running, len(self._children))
        return self._tied(running, output)

    def _close(self, parent: nn.Module, args: Any, output: Any) -> None:
        _running.set({calls: running for calls, running in _running.get().items() if calls is not self})

    def _tied(self, running: _Forward, tree: Any) -> Any:
        """Connect the outputs of all calls to the graph of the first tensor in ``tree``."""
        outputs, running.outputs = running.outputs, []
        first = next(_floating(tree))
        tied = with_zeros_for(first, outputs)
        return tree_map(lambda value: tied if value is first else value, tree)

    def _catch_up(self, running: _Forward, index: int) -> None:
        for child, skipped in self._children[running.next : index]:
            running.is_calling = True
            if running.input is None:
                weight = next(child.parameters())
                empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
            else:
                empty = running.input.flatten()[:0]
            try:
                child(*(empty.view(sizes) for sizes in skipped.takes))
            finally:
                running.is_calling = False
        running.next = max(running.next, index)


def _floating(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())
