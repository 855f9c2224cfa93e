"""Tensor parallelism, applied to a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from omnitrain.parallel.tensor.forwards import own_part, replace_forward, rows_of_region
from omnitrain.parallel.tensor.styles import STYLES


def cut_tensors(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh, ends: Collection[str] = ()) -> None:
    """Leave each rank its part of the parameters that ``styles`` cut, and let modules compute with it, in place.

    Args:
        model: its parameters equal on all ranks.
        styles: name of a module or parameter -> style of the table.
        mesh: of the ranks that share them, one dim. A cut parameter is a DTensor on it, all others stay as they are.
        ends: modules of style ``rowwise`` whose result the end of a region adds up (:mod:`.tokens`).
    """
    if not styles:
        return
    # Whole tensors are gathered in two steps, which is told once per rank; they are for checkpoints alone.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    group = mesh.get_group()
    cut: dict[nn.Parameter, nn.Parameter] = {}
    modules = dict(model.named_modules())
    owners = dict.fromkeys(name.rpartition(".")[0] for name in styles if name not in modules)
    for name, style in styles.items():
        inside, _, key = (name, "", None) if name in modules else name.rpartition(".")
        module, kind = modules[inside], STYLES[style]
        for path, parameter in module.named_parameters(recurse=False) if key is None else [(key, getattr(module, key))]:
            dim = kind.dim(path, parameter)
            if dim is not None and not isinstance(parameter, DTensor):
                cut[parameter] = _part(parameter, dim, mesh)
        if key is None and kind.forward is not None:
            replace_forward(module, rows_of_region if name in ends else kind.forward, group)
    for owner in owners:
        replace_forward(modules[owner], own_part, group)
    for module in model.modules():
        for path, parameter in module.named_parameters(recurse=False):
            if parameter in cut:
                module.register_parameter(path, cut[parameter])


def _part(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    whole = parameter.detach()
    own = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    part = DTensor.from_local(
        own.contiguous(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
