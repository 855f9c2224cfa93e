"""Activation recompute by transformers' checkpointing layers: whole blocks, all but the outputs of some ops, or parts.

Recompute of a whole block repeats the dispatch of its tokens. Parts are those that need most memory otherwise:
recompute of attention, router and the experts' activation; offload of dispatched rows and of the MoE layer's input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from omnitrain.ops.experts.install import set_experts
from omnitrain.ops.experts.routers import find_router
from omnitrain.ops.experts.weights import experts_in, is_experts
from omnitrain.ops.patch_forward import recompute_call
from omnitrain.ops.recompute import Contexts, recompute_contexts
from omnitrain.parallel.memory.offload import ActivationOffload, around_calls
from omnitrain.parallel.tensor.sequence_parallel import dividing, tokens_divided
from omnitrain.recipe.plan_groups import OffloadedTensor, RecomputedPart
from omnitrain.torch_private import PROFILER_RECORDS
from omnitrain.transformers_private import checkpoint_block

# The default ops that `selective` saves: matrix products and attention, if the installed torch has them.
SAVED_OPS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "torch_attn._varlen_attn",
    "flash_attn._flash_attn_varlen_forward",
)

# Namespace of ops -> the module that registers them when it is imported.
_REGISTERED_BY = {"torch_attn": "torch.nn.attention.varlen", "flash_attn": "flash_attn"}


# A recompute must call the same ops as its forward. FSDP units inside a block issue more profiler records in the
# recompute, because they run there outside of the root's forward.
SAC_IGNORED_OPS.update(PROFILER_RECORDS)

_OF_ATTENTION = {"attention_mask", "cu_seqlens"}  # parameters of a forward that attends


def recompute_blocks(
    blocks: Iterable[nn.Module],
    saved_ops: Sequence[str] | None = None,
    around: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
) -> None:
    """Save only the inputs of each block, and the outputs of ``saved_ops``; recompute the rest in the backward.

    ``saved_ops`` are names such as ``aten.mm``; ``around``: block -> a context in which autograd saves its inputs.
    """
    kept = None if saved_ops is None else [op for name in saved_ops if (op := find_op(name)) is not None]
    layers = list(blocks)
    has_routers = any(is_experts(module) for layer in layers for module in layer.modules())
    for block in layers:
        context = partial(around, block) if around is not None else nullcontext
        checkpoint_block(block, partial(_checkpointed, context, partial(_contexts, kept, has_routers)))


def recompute_modules(modules: Iterable[nn.Module]) -> None:
    """Save only the inputs of each call of these modules in training, and recompute the rest in the backward."""

    def checkpointed(function: Any, *args: Any) -> Any:
        return _checkpoint(function, args, partial(_contexts, None, True))

    for module in modules:
        recompute_call(module, checkpointed)


def find_op(name: str) -> Any:
    """Return torch's op ``NAMESPACE.OP`` or ``NAMESPACE.OP.OVERLOAD``; None: torch has no op of this name."""
    with suppress(ImportError):
        import_module(_REGISTERED_BY.get(name.partition(".")[0], "torch"))
    op: Any = torch.ops
    for attribute in name.split("."):
        op = getattr(op, attribute, None)
    return op


def _checkpointed(
    around: Callable[[], AbstractContextManager[Any]], contexts: Callable[[], Contexts], function: Any, *args: Any
) -> Any:
    with around():
        return _checkpoint(function, args, contexts)


def _checkpoint(function: partial[Any], args: Sequence[Any], contexts: Callable[[], Contexts]) -> Any:
    """Checkpoint ``function(*args)``, with one tensor as positional argument.

    torch restores the random state of the host, and of the devices of positional tensors. With only keyword tensors,
    dropout on a GPU would differ in the recompute.
    """
    checkpointed = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    named = function.keywords
    name = next((name for name, value in named.items() if isinstance(value, Tensor)), None)
    if name is None or any(isinstance(value, Tensor) for value in args):
        return checkpointed(function, *args)
    others = {other: value for other, value in named.items() if other != name}
    call = partial(function.func, *function.args, *args, **others)
    return checkpointed(lambda tensor: call(**{name: tensor}), named[name])


def _contexts(saved_ops: Sequence[Any] | None, has_routers: bool) -> Contexts:
    """The contexts of forward and recompute; the recompute runs after the pack's context was left."""
    divided = partial(dividing, tokens_divided())
    if saved_ops is None:
        return recompute_contexts(has_routers, in_recompute=[divided])

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = op in saved_ops or op.overloadpacket in saved_ops
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    saving, replaying = create_selective_checkpoint_contexts(policy)
    return recompute_contexts(has_routers, [lambda: saving], [divided, lambda: replaying])


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

    def saving_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        return offload.saving_only(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

    for name in blocks:
        block = model.get_submodule(name)
        for path, experts in experts_in(block):
            if "dispatched_rows" in tensors:
                set_experts(experts, saving=offload.saving_only)
            if "mlp_input" in tensors:
                around_calls(block.get_submodule(path.rpartition(".")[0]), saving_input)
