"""Recompute or offload only parts of blocks, so that no token is dispatched to its experts twice.

Recompute of a whole block repeats the dispatch of its tokens. These functions select the parts that need most memory:
recompute of attention, router and the experts' activation; offload of dispatched rows and of the MoE layer's input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from omnitrain.ops.experts.install import set_experts
from omnitrain.ops.experts.routers import find_router
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.memory.offload import ActivationOffload, around_calls
from omnitrain.parallel.memory.recompute import recompute_modules
from omnitrain.recipe.parallel import OffloadedTensor, RecomputedPart

_OF_ATTENTION = {"attention_mask", "cu_seqlens"}


def recompute_parts(model: nn.Module, blocks: Sequence[str], parts: Sequence[RecomputedPart]) -> None:
    """Recompute ``parts`` of the named blocks in the backward."""
    for name in blocks:
        block = model.get_submodule(name)
        if "attention" in parts:
            recompute_modules(attention_modules(block))
        for path, experts in experts_in(block):
            if "router" in parts:
                router = find_router(model, f"{name}.{path}".rpartition(".")[0])
                assert router is not None  # resolve_plans has checked it
                recompute_modules(router[:1])
            if "expert_activation" in parts:
                set_experts(experts, recomputes_activation=True)


def attention_modules(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost attention modules in ``block``: their forward has a parameter for a mask or cu_seqlens."""
    for child in block.children():
        if _OF_ATTENTION & inspect.signature(child.forward).parameters.keys():
            yield child
        else:
            yield from attention_modules(child)


def offload_tensors(
    model: nn.Module, blocks: Sequence[str], tensors: Sequence[OffloadedTensor], offload: ActivationOffload
) -> None:
    """Offload ``tensors`` of the MoE layers in the named blocks to host memory."""
    for name in blocks:
        block = model.get_submodule(name)
        for path, experts in experts_in(block):
            if "dispatched_rows" in tensors:
                set_experts(experts, saving=offload.saving_only)
            if "mlp_input" in tensors:
                around_calls(block.get_submodule(path.rpartition(".")[0]), partial(_saving_input, offload))


def _saving_input(
    offload: ActivationOffload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    """Offload the first tensor argument of a call wherever autograd saves it."""
    return offload.saving_only(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
