"""FSDP2, HSDP and plain replication of an omni model: one root, a unit per block, gradients that are sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True)
class Sharding:
    """How the weights of a model lie on a mesh.

    Attributes:
        compute_dtype: of weights and activations in forward and backward; None: that of the weights.
        reduce_dtype: in which gradients are added across ranks; None: that of the compute.
        keep_unsharded: keep gathered weights from forward to backward (more memory, less communication).
        offload: weights, gradients and optimizer state live in host memory.
    """

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = torch.float32
    keep_unsharded: bool = False
    offload: bool = False


def shard(model: nn.Module, mesh: DeviceMesh, how: Sharding | None = None) -> list[str]:
    """Shard ``model`` in place; it is the only root, and every block that transformers can recompute is a unit.

    Gradients are added over all ranks of the mesh and divided by nothing: losses are divided by the count of the whole
    global batch before. The root is initialised here, so that its components may run before its first forward.

    Args:
        model: with weights on the mesh's device, equal on all ranks.
        mesh: one dimension: shards over it (FSDP2); two: replicates over the first, shards over the second (HSDP).
        how: precision and placement; None: the defaults.

    Returns:
        Names of the units, the root (empty) last.
    """
    how = how or Sharding()
    precision = MixedPrecisionPolicy(param_dtype=how.compute_dtype, reduce_dtype=how.reduce_dtype)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if how.offload else OffloadPolicy()
    blocks = [(name, module) for name, module in model.named_modules() if is_block(model, name)]
    for _, block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not how.keep_unsharded,
        )
    root = fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    initialise_root(root)
    return [*(name for name, _ in blocks), ""]


def initialise_root(root: FSDPModule) -> None:
    """What FSDP would do at the root's first forward; a component that ran before would take itself for the root.

    torch (2.11 to 2.13) offers no public call for it.
    """
    root._get_fsdp_state()._lazy_init()


def is_block(model: nn.Module, name: str) -> bool:
    """Whether ``name`` is an item of a list of blocks that transformers can recompute."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(model.get_submodule(name), GradientCheckpointingLayer) and isinstance(owner, nn.ModuleList)
