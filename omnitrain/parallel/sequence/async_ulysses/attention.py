"""Async Ulysses: run an unmodified attention module so that its projections overlap with their all-to-alls.

The module's forward runs over the whole sequence with this rank's heads. Its hidden states are a placeholder without
memory, which nothing reads, because the forwards of its projections are replaced. The first projection projects this
rank's tokens and exchanges them for all tokens of its heads (``projections.py``); the other projections return their
stored result. The output projection exchanges back, then projects. Norms of heads run next to their projections, before
the exchange. All other operations (rotary positions, gates, attention) treat each head independently, so the result is
the same, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.models.foundation.recurrent_segments import token_dim
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec
from omnitrain.ops.patch_forward import forward_of, own_forward, set_forward
from omnitrain.parallel.sequence.async_ulysses.projections import (
    Projection,
    TokenExchange,
    project_and_gather,
    scatter_and_project,
)
from omnitrain.parallel.sequence.ulysses import OwnHeads, UlyssesShard, deal_heads
from omnitrain.torch_private import has_hooks, tree_iter, tree_map


@dataclass(frozen=True)
class Input:
    """A projection of hidden states."""

    linear: str  # name of the linear layer
    is_key: bool  # whether its output features are concatenated key heads, instead of query heads
    norm: str = ""  # name of the norm after it; empty: none
    norm_width: int = 0  # last dim of its input
    # whether the gradient of the norm's output is heads-first in memory in the unmodified module; the sums of the
    # norm's weight gradient must have the same order
    heads_first: bool = False


@dataclass(frozen=True)
class AttentionLayout:
    """The projections of attention modules of one class and size.

    ``hidden`` is the argument with the hidden states, ``inputs`` the input projections in the order of their calls,
    ``output`` the name of the output projection; ``num_heads`` counts query heads.
    """

    hidden: str
    inputs: tuple[Input, ...]
    output: str
    num_heads: int
    num_key_heads: int

    def replaced(self) -> list[str]:
        """Return the names of the modules whose forward is replaced."""
        return [*(i.linear for i in self.inputs), *(i.norm for i in self.inputs if i.norm), self.output]


@dataclass(frozen=True, eq=False)
class OwnHeadsShard:
    """A :class:`~omnitrain.ops.attention.spec.SequenceShard` of all tokens, whose exchanges the projections make."""

    num_local_tokens: int
    heads: OwnHeads
    attend_own_heads: Callable[[AttentionCall, OwnHeads, Callable[[AttentionCall], Tensor]], Tensor]

    def attend(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        """See :class:`~omnitrain.ops.attention.spec.SequenceShard`."""
        return self.attend_own_heads(call, self.heads, compute)


def use_async_ulysses(module: nn.Module, layout: AttentionLayout) -> None:
    """Run ``module`` by :func:`run_async` if its mask has a Ulysses shard with several ranks."""
    signature = inspect.signature(module.forward)
    function = forward_of(module)

    @torch.compiler.disable  # exchanges in flight cannot be traced
    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(function, self)  # bound here, so that a deep copy uses its own parameters
        shard = _shard_in((args, kwargs))
        if shard is None or shard.split.sp == 1:
            return plain(*args, **kwargs)
        exchange = TokenExchange(shard.lengths_of_ranks, shard.sp_group)
        arguments = signature.bind(*args, **kwargs)
        return run_async(self, plain, layout, exchange, arguments, shard.gather_tables, shard.attend_own_heads)

    set_forward(module, forward)


def run_async(
    module: nn.Module,
    plain: Callable[..., Any],
    layout: AttentionLayout,
    exchange: TokenExchange,
    arguments: inspect.BoundArguments,
    gather_tables: Callable[[Tensor, int], Tensor],
    attend_own_heads: Callable[[AttentionCall, OwnHeads, Callable[[AttentionCall], Tensor]], Tensor],
) -> Any:
    """Run one forward of an attention module, whose unmodified forward is ``plain``, with this rank's tokens.

    ``gather_tables`` all-gathers tensors without gradients; ``attend_own_heads`` computes attention with this rank's
    heads.
    """
    heads = deal_heads(layout.num_heads, layout.num_key_heads, len(exchange.lengths), exchange.rank)
    num_tokens = sum(exchange.lengths)
    hidden: Tensor = arguments.arguments[layout.hidden]
    stand_in = hidden.new_zeros(()).expand(1, num_tokens, hidden.size(-1))
    shard = OwnHeadsShard(num_tokens, heads, attend_own_heads)

    def whole(value: Any) -> Any:
        if value is hidden:
            return stand_in
        if isinstance(value, MaskSpec):
            return value.whole.on(shard)
        if isinstance(value, Tensor):
            dim = token_dim(value.shape, hidden.size(1))
            return value if dim is None else gather_tables(value, dim)
        return value

    args, kwargs = tree_map(whole, (arguments.args, arguments.kwargs))
    with ExitStack() as stack:
        for name, forward in _forwards(module, layout, heads, exchange, hidden[0]).items():
            stack.enter_context(own_forward(module.get_submodule(name), forward))
        return plain(*args, **kwargs)


def why_not_async(module: nn.Module, layout: AttentionLayout, sp: int) -> str | None:
    """Return why a module must use plain Ulysses on ``sp`` ranks; None: it supports async Ulysses.

    If ranks share a key head, its gradients would be summed after rotary positions instead of before, which rounds
    differently. Layers with a changed forward, class or hooks are not replaced.
    """
    if sp > layout.num_key_heads or layout.num_key_heads % sp:
        return f"ulysses {sp} does not divide its {layout.num_key_heads} key heads"
    norms = {i.norm for i in layout.inputs}
    for name in layout.replaced():
        part = module.get_submodule(name)
        if name not in norms:
            if "forward" in vars(part):
                return f"{name} has another forward"
            if type(part) is not nn.Linear or any(type(p) not in (Tensor, nn.Parameter) for p in part.parameters()):
                return f"{name} is not a plain nn.Linear"
        if has_hooks(part):
            return f"{name} has hooks"
    return None


def _forwards(
    module: nn.Module, layout: AttentionLayout, heads: OwnHeads, exchange: TokenExchange, hidden: Tensor
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The forwards of projections and norms during one forward of the module; the first projection computes all."""
    projections = {
        i.linear: Projection(
            _linear(module, i.linear),
            heads.keys if i.is_key else heads.queries,
            module.get_submodule(i.norm) if i.norm else None,
            module.get_submodule(i.norm).forward if i.norm else None,
            i.norm_width,
            i.heads_first,
        )
        for i in layout.inputs
    }
    results: dict[str, Tensor] = {}

    def projected(name: str, stand_in: Tensor) -> Tensor:
        if not results:
            results.update(zip(projections, project_and_gather(hidden, [*projections.values()], exchange), strict=True))
        return results.pop(name)[None]

    def output(x: Tensor) -> Tensor:
        projection = Projection(_linear(module, layout.output), heads.queries)
        return scatter_and_project(x[0], projection, exchange)[None]

    norms: dict[str, Callable[[Tensor], Tensor]] = {i.norm: lambda x: x for i in layout.inputs if i.norm}
    return norms | {name: partial(projected, name) for name in projections} | {layout.output: output}


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = module.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _shard_in(arguments: Any) -> UlyssesShard | None:
    shards = (value.shard for value in tree_iter(arguments) if isinstance(value, MaskSpec))
    return next((shard for shard in shards if isinstance(shard, UlyssesShard)), None)
