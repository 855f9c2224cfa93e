"""Muon (Jordan et al. 2024) for matrices and for experts, in the layouts of FSDP, tensor and expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from omnitrain.optim.adamw import ShardedAdamW, gradient_shard, local_shard
from omnitrain.torch_private import StridedShard

# The quintic iteration of https://kellerjordan.github.io/posts/muon, as in torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7
# Bytes of the matrices (in fp32) that a rank orthogonalizes at a time; the iteration takes four times as much.
_CHUNK_BYTES = 2**27


class MuonWithAdamW(ShardedAdamW):
    """Muon for parameter groups with ``muon``, AdamW for the other groups.

    A step of Muon moves a matrix along its orthogonalized momentum, scaled as in ``match_rms_adamw`` of
    ``torch.optim.Muon`` (Liu et al. 2025), so that learning rate and weight decay of AdamW fit. Parameters with three
    dims are matrices ``[experts, ...]``, each orthogonalized on its own. The state is one momentum per parameter,
    sharded like it.

    Orthogonalizing needs whole matrices. Where one mesh axis shards them, its ranks exchange shards of many matrices of
    one shape, so that each rank has some of them whole, and exchange the results back: no matrix is orthogonalized
    twice. Matrices that two axes shard (tensor parallelism with FSDP) are gathered on each rank. Experts that are
    sharded by their first dim are whole already.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, momentum: float, **options: Any) -> None:
        """Take parameter groups with ``muon`` (a boolean), the decay rate of its momentum, and the options of AdamW."""
        super().__init__([group | {"momentum": momentum} for group in groups], **options)

    def init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """Update a group of matrices, and leave nothing of it to AdamW's step, which calls this for each group."""
        if not group["muon"]:
            return super().init_group(group, *lists)
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        for alike in _alike(trained):
            self._update(alike, group)
        return False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded state. AdamW's would convert old formats, and expects its moments of every parameter."""
        torch.optim.Optimizer.__setstate__(self, state)

    def _update(self, matrices: Sequence[Tensor], group: dict[str, Any]) -> None:
        directions = []
        for parameter in matrices:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
            assert parameter.grad is not None
            gradient, momentum = gradient_shard(parameter.grad, parameter), local_shard(state["momentum_buffer"])
            momentum.lerp_(gradient, 1 - group["momentum"])
            directions.append(gradient.lerp(momentum, group["momentum"]))
        first, rate = matrices[0], float(group["lr"])
        step = 0.2 * rate * math.sqrt(max(first.shape[-2:]))
        for parameter, direction in zip(matrices, _orthogonal_shards(directions, first), strict=True):
            shard = local_shard(parameter)
            shard.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-step)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return ``U @ V.T`` of each of ``[..., rows, columns]`` roughly, of singular values near 1; on CUDA in bf16."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


def _alike(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of the same shape and placements, as many as the ranks orthogonalize at a time."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups.setdefault((layout, parameter.shape, parameter.device), []).append(parameter)
    for group in groups.values():
        first, axes = group[0], _axes_of_matrices(group[0])
        ranks = first.device_mesh.size(axes[0]) if isinstance(first, DTensor) and len(axes) == 1 else 1
        number = ranks * max(1, _CHUNK_BYTES // (4 * first.numel()))
        yield from (group[start : start + number] for start in range(0, len(group), number))


def _axes_of_matrices(parameter: Tensor) -> list[int]:
    """Return the mesh axes that shard the matrices of a parameter, and not only its experts."""
    if not isinstance(parameter, DTensor):
        return []
    return [
        axis
        for axis, placement in enumerate(parameter.placements)
        if parameter.device_mesh.size(axis) > 1
        and isinstance(placement, Shard | StridedShard)
        and placement.dim >= parameter.ndim - 2
    ]


def _orthogonal_shards(shards: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the shards of orthogonalized matrices, each with the shape and placements of the parameter ``like``."""
    axes, stacked = _axes_of_matrices(like), torch.stack(list(shards))
    if not axes:
        return list(_in_chunks(stacked).unbind(0))
    assert isinstance(like, DTensor)
    mesh, shape = like.device_mesh, torch.Size((len(shards), *like.shape))
    sharded = [_behind_first_dim(placement) for placement in like.placements]
    gathered: list[Placement] = [Replicate()] * mesh.ndim
    if len(axes) == 1:  # to each rank some whole matrices
        gathered = [Shard(0) if axis in axes else placement for axis, placement in enumerate(sharded)]
    whole = _on_mesh(stacked.to(mesh.device_type), mesh, sharded, shape).redistribute(placements=gathered)
    result = _on_mesh(_in_chunks(whole.to_local()), mesh, gathered, shape).redistribute(placements=sharded)
    return list(result.to_local().to(stacked.device).unbind(0))


def _in_chunks(matrices: Tensor) -> Tensor:
    """Orthogonalize ``[..., rows, columns]`` some matrices at a time, because the iteration takes much memory."""
    if not matrices.numel():
        return matrices
    rows, columns = matrices.shape[-2:]
    chunks = matrices.flatten(0, -3).split(max(1, _CHUNK_BYTES // (4 * rows * columns)))
    return torch.cat([orthogonalized(chunk) for chunk in chunks]).view(matrices.shape)


def _on_mesh(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _behind_first_dim(placement: Placement) -> Placement:
    """Return the placement of tensors ``[batch, ...]`` whose entries have ``placement``."""
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement
