"""Hooks that report which component of a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.torch_private import tree_leaves


def follow_components(model: Any, note: Callable[[str], object]) -> list[RemovableHandle]:
    """Call ``note(component)``, which must not wait, when the forward or the backward of a component begins.

    The hooks are on the largest modules with parameters of only one component, and on their direct children, because
    methods of a component may call the children one by one. Blocks get no hooks, because they may be compiled.
    """
    return [hook for module, name in component_modules(model) for hook in _follow(module, name, note)]


def component_modules(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that :func:`follow_components` follows, each with its component."""
    owners = {id(weight): name for name, weights in model.components.items() for weight in weights.values()}
    for path, name in _largest_modules(model, owners, ""):
        largest = model.get_submodule(path)
        for module in (largest, *largest.children()):
            if not isinstance(module, GradientCheckpointingLayer):
                yield module, name


def _largest_modules(module: nn.Module, owners: Mapping[int, str], path: str) -> Iterator[tuple[str, str]]:
    """Path and component of the largest modules that belong to one component."""
    names = {owners[id(weight)] for weight in module.parameters() if id(weight) in owners}
    if len(names) == 1 and path:
        yield path, names.pop()
    elif names:
        for child_name, child in module.named_children():
            yield from _largest_modules(child, owners, f"{path}.{child_name}" if path else child_name)


def _follow(module: nn.Module, name: str, note: Callable[[str], object]) -> Iterator[RemovableHandle]:
    def begin(*_: Any) -> None:  # a forward, or its backward
        note(name)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        if outputs:
            register_multi_grad_hook(outputs, begin, mode="any")

    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end)
