"""The forward of each tensor parallel style.

Activations are replicated on all ranks, except between a colwise and a rowwise matrix, where each rank has a slice of
the features. Only the all-reduce of sums and the all-gather of columns are collectives. Taking a slice of replicated
activations needs none, because gradients of replicated tensors are partial on each rank
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
from omnitrain.torch_private import parameters_of

Around = Callable[[Forward, dist.ProcessGroup], Forward]


def replace_forward(module: nn.Module, around: Around, group: dist.ProcessGroup) -> None:
    """Wrap the module's current forward, which may be replaced already, with ``around``."""
    set_forward(module, around(forward_of(module), group))


def own_part(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """Run the forward unchanged on this rank's shard of the parameters."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _local_parameters(self):
            return plain(self, *args, **kwargs)

    return forward


def columns_gathered(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """``[..., in] -> [..., out]``, or ids -> embeddings: compute this rank's columns, then all-gather."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with _local_parameters(self):
            return gather_columns(plain(self, x), group)

    return forward


def rows(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """``[..., slice of in] -> [..., out]``: all-reduce the product, then add the bias once."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with _local_parameters(self), _without_bias(self) as bias:
            y = add_up(plain(self, x), group)
        return y if bias is None else y + bias

    return forward


def rows_of_region(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """Like :func:`rows`; under sequence parallelism return a partial sum, which the end of the region sums."""
    whole = rows(plain, group)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if tokens_divided() is None:
            return whole(self, x)
        with _local_parameters(self), _without_bias(self) as bias:
            y = plain(self, x)
        # Only rank 0 adds it to the sum, but all ranks need it in their graph to get a gradient.
        return y if bias is None else y + bias * float(group.rank() == 0)

    return forward


def rows_of_whole(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """``[..., in] -> [..., out]``: like :func:`rows` on this rank's slice of the input's columns."""
    summed = rows(plain, group)
    return lambda self, x: summed(self, own_columns(x, group))


def vocabulary(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """An embedding whose vocabulary is sharded: embed this rank's ids, then all-reduce."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        with _local_parameters(self):
            num_ids = self.weight.size(0)
            first = group.rank() * num_ids
            local = ids - first
            is_local = (local >= 0) & (local < num_ids)
            with _padding_at(self, first, num_ids):
                rows = plain(self, local.clamp(0, num_ids - 1))
        return add_up(rows.masked_fill(~is_local[..., None], 0.0), group)

    return forward


def output_added_up(plain: Forward, group: dist.ProcessGroup) -> Forward:
    """A module with sharded children whose output is a partial sum: all-reduce it."""
    return lambda self, *args, **kwargs: add_up(plain(self, *args, **kwargs), group)


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the module's DTensors by their local shards while the context is open; autograd sees the conversion."""
    whole: dict[str, Any] = {name: p for name, p in parameters_of(module).items() if isinstance(p, DTensor)}
    parameters_of(module).update({name: p.to_local() for name, p in whole.items()})
    try:
        yield
    finally:
        parameters_of(module).update(whole)


@contextmanager
def _without_bias(module: nn.Module) -> Iterator[Tensor | None]:
    linear = getattr(module, "base_layer", module)  # a layer with an adapter wraps the linear layer
    bias = parameters_of(linear).get("bias")
    if bias is None:
        yield None
        return
    parameters_of(linear)["bias"] = None
    try:
        yield bias
    finally:
        parameters_of(linear)["bias"] = bias


@contextmanager
def _padding_at(embedding: Any, first: int, num_ids: int) -> Iterator[None]:
    """Shift ``padding_idx`` to this rank's ids while the context is open; None if another rank has it."""
    padding = embedding.padding_idx
    embedding.padding_idx = padding - first if padding is not None and 0 <= padding - first < num_ids else None
    try:
        yield
    finally:
        embedding.padding_idx = padding
