"""Sum the gradients of parameters that tensor parallelism replicates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.ops.collectives import all_reduce_in_buckets
from omnitrain.parallel.state import ParallelState


def keep_on_first_tp_rank(parameters: Iterable[nn.Parameter], state: ParallelState) -> None:
    """Before a backward, let only the first ``tp`` rank keep earlier gradients that :func:`add_up_over_tp` will sum.

    They are the same on all of these ranks, and would count once for each of them.
    """
    if state.tp_rank > 0:
        for gradient in _replicated_gradients(parameters):
            gradient.zero_()


def add_up_over_tp(parameters: Iterable[nn.Parameter], state: ParallelState) -> None:
    """All-reduce the gradients of all parameters that tensor parallelism does not shard, over the ``tp`` ranks.

    These ranks have the same samples. A rank's gradient is partial: for a norm over the rank's heads, or for a router
    or a tower if only one of the ranks counts the loss. Call it once per optimizer step, after the last backward, with
    parameters in the same order on all ranks.
    """
    if state.size("tp") > 1:
        all_reduce_in_buckets(_replicated_gradients(parameters), state.tp_mesh.get_group())


def _replicated_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None and not is_cut(parameter)]


def is_cut(parameter: Tensor) -> bool:
    """Return whether tensor parallelism shards the parameter."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
