"""How a module computes with its part of a weight: the forward of each style.

A rank holds the same activations as its peers, or, between a matrix cut by columns and one cut by rows, its own part of
them. Only sums over ranks and columns put side by side need a collective; what takes whole activations into a part of
them needs none, because a gradient of what all ranks hold alike is each rank's own part of it
(:mod:`omnitrain.ops.collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.ops.collectives import add_up, gather_columns, own_columns
from omnitrain.ops.patch_forward import Forward, forward_of, set_forward
from omnitrain.parallel.tensor.sequence_parallel import tokens_divided

Around = Callable[[Forward, dist.ProcessGroup], Forward]


def replace_forward(module: nn.Module, around: Around, group: dist.ProcessGroup) -> None:
    """Put ``around`` the module's forward, whatever that is by now."""
    set_forward(module, around(forward_of(module), group))


def own_part(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """The module as it is, on this rank's part of its parameters."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _local_parameters(self):
            return plain(self, *args, **kwargs)

    return forward


def columns_gathered(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """``[..., in] -> [..., out]``, or ids -> embeddings, of which each rank computes its columns."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with _local_parameters(self):
            return gather_columns(plain(self, x), group)

    return forward


def rows(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """``[..., own part of in] -> [..., out]``; the bias is added once, to the sum."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with _local_parameters(self), _without_bias(self) as bias:
            y = add_up(plain(self, x), group)
        return y if bias is None else y + bias

    return forward


def rows_of_region(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """As :func:`rows`; where tokens are divided, this rank's part of the sum, which the end of the region adds up."""
    whole = rows(plain, group)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if tokens_divided() is None:
            return whole(self, x)
        with _local_parameters(self), _without_bias(self) as bias:
            y = plain(self, x)
        # In the sum of one rank, and in the graph of all: every rank has a gradient of it.
        return y if bias is None else y + bias * float(group.rank() == 0)

    return forward


def rows_of_whole(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """``[..., in] -> [..., out]``; each rank takes its part of the input's columns."""
    summed = rows(plain, group)
    return lambda self, x: summed(self, own_columns(x, group))


def vocabulary(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """An embedding of which each rank has the rows of its own ids."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        with _local_parameters(self):
            number = self.weight.size(0)
            first = group.rank() * number
            own = ids - first
            is_own = (own >= 0) & (own < number)
            with _padding_at(self, first, number):
                rows = plain(self, own.clamp(0, number - 1))
        return add_up(rows.masked_fill(~is_own[..., None], 0.0), group)

    return forward


def output_added_up(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """A module whose parts are shared, so that each rank returns a part of the sum."""
    return lambda self, *args, **kwargs: add_up(plain(self, *args, **kwargs), group)


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """While open, the module's own DTensors are this rank's parts of them; what is computed has a graph to them."""
    whole: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    module._parameters.update({name: p.to_local() for name, p in whole.items()})
    try:
        yield
    finally:
        module._parameters.update(whole)


@contextmanager
def _without_bias(module: nn.Module) -> Iterator[Tensor | None]:
    linear = getattr(module, "base_layer", module)  # of a layer with an adapter, the bias is inside
    bias = linear._parameters.get("bias")
    if bias is None:
        yield None
        return
    linear._parameters["bias"] = None
    try:
        yield bias
    finally:
        linear._parameters["bias"] = bias


@contextmanager
def _padding_at(embedding: Any, first: int, number: int) -> Iterator[None]:
    """While open, the id whose row gets no gradient is counted from ``first``; None where another rank has it."""
    padding = embedding.padding_idx
    embedding.padding_idx = padding - first if padding is not None and 0 <= padding - first < number else None
    try:
        yield
    finally:
        embedding.padding_idx = padding
