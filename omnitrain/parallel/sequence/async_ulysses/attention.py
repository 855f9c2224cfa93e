"""Async Ulysses: an unmodified attention module, driven so that its projections and their all-to-alls overlap.

The module's own forward runs over the whole row with this rank's heads. What it is given for hidden states takes no
memory and is read by nobody: while it runs, the forward of its projections is replaced. The first of them projects
this rank's real rows and exchanges them for all rows of its heads (``projections.py``); the
others hand out what is there. The one behind attention exchanges back and projects. Norms of heads run beside their
projections, before the exchange. All between (rotary positions, gates, attention) works on each head by itself, so what
comes out is the same, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.models.discovery.parameter_reads import leaves
from omnitrain.models.foundation.recurrent_segments import each, row_dim
from omnitrain.ops.attention import MaskSpec
from omnitrain.ops.attention.spec import Call
from omnitrain.ops.patch_forward import forward_of, own_forward, set_forward
from omnitrain.parallel.sequence.async_ulysses.projections import (
    Projection,
    RowExchange,
    project_and_gather,
    scatter_and_project,
)
from omnitrain.parallel.sequence.ulysses import OwnHeads, UlyssesShard, deal_heads


@dataclass(frozen=True)
class Input:
    """A projection of hidden states.

    Attributes:
        linear: name of the layer.
        is_key: its output features are key heads side by side, not query heads.
        norm: name of the norm behind it; empty: none.
        norm_width: last dim of what the norm is given.
        heads_first: how the gradient of the norm's output lies in memory when the module runs by itself, so that its
            weight's gradient is added up in the same order.
    """

    linear: str
    is_key: bool
    norm: str = ""
    norm_width: int = 0
    heads_first: bool = False


@dataclass(frozen=True)
class AttentionLayout:
    """How attention modules of one class and size are driven.

    Attributes:
        hidden: name of the argument that is the hidden states.
        inputs: in the order in which the module calls them.
        output: name of the projection behind attention.
        num_heads: query heads.
        num_key_heads: key heads.
    """

    hidden: str
    inputs: tuple[Input, ...]
    output: str
    num_heads: int
    num_key_heads: int

    def replaced(self) -> list[str]:
        """Names of the modules whose forward is replaced."""
        return [*(i.linear for i in self.inputs), *(i.norm for i in self.inputs if i.norm), self.output]


@dataclass(frozen=True, eq=False)
class OwnHeadsShard:
    """For a module that is driven: rows have been exchanged for heads already, and will be exchanged back behind it.

    A :class:`~omnitrain.ops.attention.spec.SequenceShard`.
    """

    num_rows: int
    heads: OwnHeads
    attend_own_heads: Callable[[Call, OwnHeads, Callable[[Call], Tensor]], Tensor]

    def attend(self, call: Call, compute: Callable[[Call], Tensor]) -> Tensor:
        """See :class:`~omnitrain.ops.attention.spec.SequenceShard`."""
        return self.attend_own_heads(call, self.heads, compute)


def drive(module: nn.Module, layout: AttentionLayout) -> None:
    """Make ``module`` run by :func:`run_driven` wherever its mask says that ranks exchange rows for heads."""
    signature = inspect.signature(module.forward)
    function = forward_of(module)

    @torch.compiler.disable  # what is on its way between ranks cannot be traced
    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(function, self)  # of a deep copy, its own
        shard = _shard_in((args, kwargs))
        if shard is None or shard.split.sp == 1:
            return plain(*args, **kwargs)
        exchange = RowExchange(shard.rows_of_ranks, shard.sp_group)
        arguments = signature.bind(*args, **kwargs)
        return run_driven(self, plain, layout, exchange, arguments, shard.gather_tables, shard.attend_own_heads)

    set_forward(module, forward)


def run_driven(
    module: nn.Module,
    plain: Callable[..., Any],
    layout: AttentionLayout,
    exchange: RowExchange,
    arguments: inspect.BoundArguments,
    gather_tables: Callable[[Tensor, int], Tensor],
    attend_own_heads: Callable[[Call, OwnHeads, Callable[[Call], Tensor]], Tensor],
) -> Any:
    """One forward of an attention module.

    Args:
        module: the attention.
        plain: its own forward.
        layout: which of its inputs are projected and exchanged, and how many heads it has.
        exchange: the ranks.
        arguments: of the forward, with this rank's rows.
        gather_tables: the whole row of a tensor without gradients that runs along this rank's rows in a dim.
        attend_own_heads: attention of this rank's heads.

    Returns:
        What ``plain`` returns, its first output for this rank's rows.
    """
    heads = deal_heads(layout.num_heads, layout.num_key_heads, len(exchange.rows), exchange.rank)
    num_rows = sum(exchange.rows)
    hidden: Tensor = arguments.arguments[layout.hidden]
    stand_in = hidden.new_zeros(()).expand(1, num_rows, hidden.size(-1))
    shard = OwnHeadsShard(num_rows, heads, attend_own_heads)

    def whole(value: Any) -> Any:
        if value is hidden:
            return stand_in
        if isinstance(value, MaskSpec):
            return value.whole.on(shard)
        if isinstance(value, Tensor):
            dim = row_dim(value.shape, hidden.size(1))
            return value if dim is None else gather_tables(value, dim)
        return each(value, whole)

    run = _Run(module, layout, heads, exchange, hidden[0])
    args, kwargs = (whole(list(arguments.args)), whole(arguments.kwargs))
    with run.replacing():
        return plain(*args, **kwargs)


def why_not_driven(module: nn.Module, layout: AttentionLayout, sp: int) -> str | None:
    """Why a module is better left as it is on ``sp`` ranks; None: it can be driven.

    Where ranks share a key head, its gradients would be added up behind rotary positions instead of before them, which
    rounds differently. Layers whose forward, class or hooks something else has changed are not replaced.
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
                return f"{name} is no plain linear layer"
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"{name} has hooks"
    return None


class _Run:
    """One forward: what the replaced modules do."""

    def __init__(
        self, module: nn.Module, layout: AttentionLayout, heads: OwnHeads, exchange: RowExchange, hidden: Tensor
    ) -> None:
        self._module, self._layout, self._heads, self._exchange, self._hidden = module, layout, heads, exchange, hidden
        self._norms = {i.norm: module.get_submodule(i.norm).forward for i in layout.inputs if i.norm}
        self._made: dict[str, Tensor] = {}

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """The projections and norms do their part of the run instead of their own forward."""
        forwards: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(self._norms, _as_it_is)
        forwards |= {i.linear: self._hand_out(i.linear) for i in self._layout.inputs}
        forwards[self._layout.output] = self._output
        with ExitStack() as stack:
            for name, forward in forwards.items():
                stack.enter_context(own_forward(self._module.get_submodule(name), forward))
            yield

    def _hand_out(self, name: str) -> Callable[[Tensor], Tensor]:
        def forward(stand_in: Tensor) -> Tensor:
            if not self._made:
                names = [i.linear for i in self._layout.inputs]
                outputs = project_and_gather(self._hidden, self._projections(), self._exchange)
                self._made = dict(zip(names, outputs, strict=True))
            return self._made.pop(name)[None]

        return forward

    def _projections(self) -> list[Projection]:
        return [
            Projection(
                self._linear(i.linear),
                self._heads.keys if i.is_key else self._heads.queries,
                self._module.get_submodule(i.norm) if i.norm else None,
                self._norms.get(i.norm),
                i.norm_width,
                i.heads_first,
            )
            for i in self._layout.inputs
        ]

    def _output(self, x: Tensor) -> Tensor:
        projection = Projection(self._linear(self._layout.output), self._heads.queries)
        return scatter_and_project(x[0], projection, self._exchange)[None]

    def _linear(self, name: str) -> nn.Linear:
        linear = self._module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _shard_in(arguments: Any) -> UlyssesShard | None:
    shards = (value.shard for value in leaves(arguments) if isinstance(value, MaskSpec))
    return next((shard for shard in shards if isinstance(shard, UlyssesShard)), None)
