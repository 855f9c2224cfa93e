"""Compute the global gradient norm over parameters on any mixture of meshes, and clip by it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from omnitrain.errors import UserError
from omnitrain.optim.adamw import local_shard
from omnitrain.torch_private import multiply_each, norm_of_each

# The mesh of a gradient and the mesh dims that shard it. None: every rank has the whole gradient.
_Sharding = tuple[DeviceMesh, tuple[int, ...]] | None
_PIECE = 2**14  # elements whose squares a CPU adds up in fp32: of 2**24, it loses the fourth digit


@dataclass(frozen=True)
class Holders:
    """The ranks over which the parameters of a model are spread, where no rank has a shard of all of them."""

    stages: dist.ProcessGroup | None = None  # the pipeline ranks of this rank's column; None: no pipeline
    counted_elsewhere: Set[torch.nn.Parameter] = frozenset()  # of this rank, that another stage has and counts, too
    sections: dist.ProcessGroup | None = None  # all ranks of a run whose components are in sections; None: no sections
    counts: bool = True  # whether this rank adds the sum of its section, as one of its ranks does
    device: str = "cpu"  # type of the device on which all of them add up, since a rank may have no gradient to tell it


# Models whose ranks hold different parts of them -> their parameters and holders, in the order in which all ranks laid
# them out.
_spread: WeakKeyDictionary[nn.Module, tuple[list[nn.Parameter], Holders]] = WeakKeyDictionary()


def remember_holders(model: nn.Module, holders: Holders) -> None:
    """Count the parameters that ``model`` has now as ``holders`` says, whenever a norm has some of them."""
    _spread[model] = list(model.parameters()), holders


def gradient_norm(parameters: Iterable[torch.nn.Parameter] | torch.nn.Parameter) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together, each element counted once; the same on every rank.

    All ranks pass the same parameters, plain tensors or DTensors on any meshes, in the same order; gradients may be
    missing on some, and count as zero; parameters of other stages or sections are on the meta device. Returns scalar
    fp32 on the gradients' device. Raises ValueError: a gradient is a partial sum, which must be reduced before.
    """
    others = dict.fromkeys(_listed(parameters))
    squares = []
    for of_model, holders in _spread.values():
        if own := [parameter for parameter in of_model if parameter in others]:
            counted = [parameter for parameter in own if parameter not in holders.counted_elsewhere]
            squares.append(_over_holders(_square(counted), holders))
            for parameter in own:
                del others[parameter]
    if others or not squares:
        squares.append(_square(others))
    return _total(squares).sqrt().float()


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter] | torch.nn.Parameter, max_norm: float | None
) -> torch.Tensor:
    """Scale gradients in place to a global norm of ``max_norm``, above 0 (None: not); return the norm, scalar fp32."""
    if max_norm is not None and not max_norm > 0:
        raise UserError(f"max_norm: found {max_norm!r}; expected a norm above 0, or None to measure without clipping")
    listed = _listed(parameters)
    norm = gradient_norm(listed)
    if max_norm is not None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in listed:
            if parameter.grad is not None:
                local = local_shard(parameter.grad)
                by_device.setdefault(local.device, []).append(local)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device, gradients in by_device.items():
            multiply_each(gradients, factor.to(device))
    return norm


def _square(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The sum of squares over the meshes of the parameters, scalar fp64."""
    norms: dict[_Sharding, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            sharded = parameter if parameter.grad is None else parameter.grad
            local = [] if parameter.grad is None else [local_shard(parameter.grad)]
            norms.setdefault(_sharding(sharded), []).extend(local)
    return _total([_reduced(_sum_of_squares(locals_), sharding) for sharding, locals_ in norms.items()])


def _over_holders(square: torch.Tensor, holders: Holders) -> torch.Tensor:
    total = square.to(holders.device)
    if holders.stages is not None:
        dist.all_reduce(total, group=holders.stages)
    if holders.sections is not None:
        total = total if holders.counts else torch.zeros_like(total)
        dist.all_reduce(total, group=holders.sections)
    return total


def _total(squares: list[torch.Tensor]) -> torch.Tensor:
    """The sum of scalars fp64, on a GPU if one of them is there."""
    if not squares:
        return torch.zeros((), dtype=torch.float64)
    device = next((square.device for square in squares if square.is_cuda), squares[0].device)
    return torch.stack([square.to(device) for square in squares]).sum()


def _listed(parameters: Iterable[torch.nn.Parameter] | torch.nn.Parameter) -> list[torch.nn.Parameter]:
    """Return a list of parameters. A single parameter counts as one, as in torch, and not as an iterable of rows."""
    return [parameters] if isinstance(parameters, torch.nn.Parameter) else list(parameters)


def _sharding(tensor: torch.Tensor) -> _Sharding:
    if not isinstance(tensor, DTensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a gradient of shape {tuple(tensor.shape)} is a partial sum: {tensor.placements}; reduce it")
    mesh = tensor.device_mesh
    sharded = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return mesh, tuple(dim for dim in sharded if mesh.size(dim) > 1)


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a scalar fp64; it adds squares in fp32 within a piece and in fp64 across pieces."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # On a GPU, torch adds up pieces by itself.
    pieces = [piece for own in gradients for piece in (own.reshape(-1).split(_PIECE) if own.is_cpu else (own,))]
    norms = norm_of_each(pieces, 2, torch.float32)
    return torch.stack([norm.to(norms[0].device) for norm in norms]).double().square().sum()


def _reduced(square: torch.Tensor, sharding: _Sharding) -> torch.Tensor:
    if sharding is None:
        return square
    mesh, dims = sharding
    total = square.to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(total, group=mesh.get_group(dim))
    return total
