"""Apply tensor parallelism to a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from omnitrain.ops.collectives import all_reduce_in_buckets
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.tensor.forwards import own_part, replace_forward, rows_of_region
from omnitrain.parallel.tensor.styles import STYLES


def shard_matrices(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh, ends: Collection[str] = ()) -> None:
    """Shard the parameters that ``styles`` select, and replace the forwards of their modules, in place.

    Sharded parameters become DTensors on the one-dimensional ``mesh``; others are unchanged. ``ends``: modules of style
    ``rowwise`` whose results the end of a region sums (:mod:`.sequence_parallel`).
    """
    if not styles:
        return
    # Checkpoints gather weights with two Shard placements in two steps; torch warns about that on each rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    group = mesh.get_group()
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    modules = dict(model.named_modules())
    owners = dict.fromkeys(name.rpartition(".")[0] for name in styles if name not in modules)
    for name, style in styles.items():
        kind, module = STYLES[style], modules.get(name)
        listed = module.named_parameters(recurse=False) if module is not None else [(name, model.get_parameter(name))]
        for path, parameter in listed:
            dim = kind.dim(path.rpartition(".")[2], parameter)
            if dim is not None and not isinstance(parameter, DTensor):
                sharded[parameter] = _shard(parameter, dim, mesh)
        if module is not None and kind.forward is not None:
            replace_forward(module, rows_of_region if name in ends else kind.forward, group)
    for owner in owners:
        replace_forward(modules[owner], own_part, group)
    for module in model.modules():
        for path, parameter in module.named_parameters(recurse=False):
            if parameter in sharded:
                module.register_parameter(path, sharded[parameter])


def _shard(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    whole = parameter.detach()
    local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    shard = DTensor.from_local(
        local.contiguous(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def keep_on_first_tp_rank(parameters: Iterable[nn.Parameter], state: ParallelState) -> None:
    """Let one ``tp`` rank alone keep gradients before a backward, so that :func:`add_up_over_tp` adds them once."""
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
