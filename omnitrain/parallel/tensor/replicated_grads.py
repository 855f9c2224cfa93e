"""Sum the gradients of parameters that tensor parallelism replicates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.ops.collectives import all_reduce_in_buckets
from omnitrain.parallel.state import ParallelState


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
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None and not is_cut(parameter)]
    all_reduce_in_buckets(gradients, group)


def is_cut(parameter: Tensor) -> bool:
    """Return whether tensor parallelism shards the parameter."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
