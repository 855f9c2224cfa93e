"""Sum the gradients of parameters that tensor parallelism replicates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from omnitrain.parallel.state import ParallelState

_BUCKET_BYTES = 2**26  # per collective


def add_up_over_tp(parameters: Iterable[nn.Parameter], state: ParallelState) -> None:
    """All-reduce the gradients of all parameters that tensor parallelism does not shard, over the ``tp`` ranks.

    A rank's gradient of them is partial: for a norm over the rank's heads, or for a router or a tower if only one of
    the ranks counts the loss. Call it once per optimizer step, after the last backward.

    Args:
        parameters: parameters in the same order on all ranks.
        state: the parallel state; its ``tp`` ranks have the same samples.
    """
    if state.size("tp") == 1:
        return
    group = state.tp_mesh.get_group()
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not is_cut(parameter):
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for gradients in by_kind.values():
        for bucket in _buckets(gradients):
            flat = _flatten_dense_tensors(bucket)
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def is_cut(parameter: Tensor) -> bool:
    """Return whether tensor parallelism shards the parameter."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
