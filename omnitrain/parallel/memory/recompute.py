"""Activation recompute by transformers' own checkpointing layers: whole blocks, or all but the outputs of some ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from omnitrain.ops.attention import inside, packed_row
from omnitrain.ops.cpu.unread_rows import reading, rows_read
from omnitrain.ops.experts import RoutingTape, is_experts
from omnitrain.parallel.tensor.sequence_parallel import dividing, tokens_divided

MakeContext = Callable[[], AbstractContextManager[Any]]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# What `selective` keeps unless a plan says otherwise: matrix products and attention, as far as this torch has them.
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

# Namespace of ops -> the module that tells torch of them when it is imported.
_TOLD_BY = {"torch_attn": "torch.nn.attention.varlen", "flash_attn": "flash_attn"}


# A recompute must call the ops of its forward. Units of FSDP within a block name more of what they do in the recompute,
# where none of them finds that the model's forward has begun.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)


def recompute_blocks(
    blocks: Iterable[nn.Module],
    saved_ops: Sequence[str] | None = None,
    around: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
) -> None:
    """Keep only the inputs of each block, and the outputs of ``saved_ops``; compute the rest again in the backward.

    Args:
        blocks: layers that transformers can checkpoint; they do it in training mode.
        saved_ops: names such as ``aten.mm``; None: nothing but the inputs is kept.
        around: block -> a context in which its inputs are saved, such as one that offloads them.
    """
    kept = None if saved_ops is None else [found for op in saved_ops if (found := find_op(op)) is not None]
    layers = list(blocks)
    has_routers = any(is_experts(module) for layer in layers for module in layer.modules())
    for block in layers:
        context = partial(around, block) if around is not None else nullcontext
        layer: Any = block
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, context, partial(_contexts, kept, has_routers))


def recompute_modules(modules: Iterable[nn.Module]) -> None:
    """Keep only the inputs of each call of these in training, and compute the rest again in the backward."""
    for module in modules:
        module.forward = partial(_called_again, module, module.forward)


def _called_again(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return _computed_again(partial(forward, **kwargs), args, partial(_contexts, None, True))


def find_op(name: str) -> Any:
    """The op ``NAMESPACE.OP`` or ``NAMESPACE.OP.OVERLOAD`` of torch; None: there is none of that name."""
    with suppress(ImportError):
        import_module(_TOLD_BY.get(name.partition(".")[0], "torch"))
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _checkpointed(
    around: Callable[[], AbstractContextManager[Any]], contexts: Callable[[], Contexts], function: Any, *args: Any
) -> Any:
    with around():
        return _computed_again(function, args, contexts)


def _computed_again(function: partial[Any], args: Sequence[Any], contexts: Callable[[], Contexts]) -> Any:
    """``function(*args)``, one of whose tensors is positional.

    Of random numbers torch restores, beside those of the host, those of devices that positional arguments are on: a
    dropout in a call by name would be another one in the backward, on a GPU alone.
    """
    again = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    named = function.keywords
    name = next((name for name, value in named.items() if isinstance(value, Tensor)), None)
    if name is None or any(isinstance(value, Tensor) for value in args):
        return again(function, *args)
    others = {other: value for other, value in named.items() if other != name}
    call = partial(function.func, *function.args, *args, **others)
    return again(lambda tensor: call(**{name: tensor}), named[name])


def _contexts(saved_ops: Sequence[Any] | None, has_routers: bool) -> Contexts:
    """For forward and recompute: the latter happens after the packed row's context was left.

    Routers are taped: rounding may differ in the recompute, and a token that then goes to another expert has another
    gradient, or another number of rows on some rank.
    """
    forward: list[MakeContext] = []
    again: list[MakeContext] = [
        partial(inside, packed_row()),
        partial(reading, rows_read()),
        partial(dividing, tokens_divided()),
    ]
    if has_routers:
        tape = RoutingTape()
        forward, again = [tape.recording], [*again, tape.replaying]
    if saved_ops is not None:
        saving, replaying = create_selective_checkpoint_contexts(partial(_policy, saved_ops))
        forward, again = [*forward, lambda: saving], [*again, lambda: replaying]
    return _Inside(forward), _Inside(again)


def _policy(saved_ops: Sequence[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = op in saved_ops or op.overloadpacket in saved_ops
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class _Inside(AbstractContextManager[None]):
    """All contexts that ``makers`` make; made anew whenever it is entered, once per backward through a graph."""

    def __init__(self, makers: Sequence[MakeContext]) -> None:
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
