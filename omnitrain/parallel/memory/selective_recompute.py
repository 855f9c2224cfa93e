"""Activations of parts of blocks: computed again, or waiting in host memory, so that no row of experts travels twice.

A block that is recomputed as a whole sends its tokens to their experts again. What costs memory in it can be named
instead: attention, the router, what lies between the experts' products; the rows that came to the experts, and what a
layer of experts is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from omnitrain.ops.experts import experts_in, set_experts
from omnitrain.ops.experts.routers import find_router
from omnitrain.parallel.memory.offload import ActivationOffload, around_calls
from omnitrain.parallel.memory.recompute import recompute_modules
from omnitrain.recipe.parallel import OffloadedTensor, RecomputedPart

_OF_ATTENTION = {"attention_mask", "cu_seqlens"}


def recompute_parts(model: nn.Module, blocks: Sequence[str], parts: Sequence[RecomputedPart]) -> None:
    """Compute ``parts`` of the blocks of these names again in the backward."""
    for name in blocks:
        block = model.get_submodule(name)
        if "attention" in parts:
            recompute_modules(attention_modules(block))
        for path, experts in experts_in(block):
            if "router" in parts:
                router = find_router(model, f"{name}.{path}".rpartition(".")[0])
                assert router is not None  # of a plan that was resolved
                recompute_modules(router[:1])
            if "expert_activation" in parts:
                set_experts(experts, recomputes_activation=True)


def attention_modules(block: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules inside ``block`` that mix rows: their forward takes a mask or the borders of samples."""
    for child in block.children():
        if _OF_ATTENTION & inspect.signature(child.forward).parameters.keys():
            yield child
        else:
            yield from attention_modules(child)


def offload_tensors(
    model: nn.Module, blocks: Sequence[str], tensors: Sequence[OffloadedTensor], offload: ActivationOffload
) -> None:
    """Let ``tensors`` of the layers of experts in the blocks of these names wait in host memory."""
    for name in blocks:
        block = model.get_submodule(name)
        for path, experts in experts_in(block):
            if "dispatched_rows" in tensors:
                set_experts(experts, saving=offload.saving_only)
            if "mlp_input" in tensors:
                around_calls(block.get_submodule(path.rpartition(".")[0]), partial(_of_input, offload))


def _of_input(
    offload: ActivationOffload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    """What is saved of the first argument of a call is offloaded."""
    return offload.saving_only(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
