"""Avoid the copies that torch (2.11 to 2.13) makes in FSDP units on a mesh of one rank.

torch casts the parameters, then copies them into the all-gather output; it packs the gradients into one buffer, then
copies it into the reduce-scatter output. Here the cast writes directly into the output, and both buffers are the same.
This saves 12 of the 24 bytes that a unit moves per parameter in a forward and backward. A mesh has one rank in training
on one GPU, and for experts that no other rank has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def skip_copy_in_out(unit: FSDPModule) -> None:
    """Avoid these copies in a unit.

    Args:
        unit: just returned by ``fully_shard``, on a mesh of one rank, without CPU offload.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return  # other units have all its parameters
    unit.set_custom_reduce_scatter(_SharedBuffer())
    for parameter in group.fsdp_params:
        parameter.__class__ = _CastIntoOutput


class _CastIntoOutput(FSDPParam):
    """Allocate the all-gather output in the compute dtype, so that torch's copy into it casts."""

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """``[n]`` in the stored dtype; torch's version has the compute dtype."""
        stored = self._sharded_param_data
        self.init_all_gather_outputs([stored.numel()], [self.param_dtype or stored.dtype], 1, stored.device)
        return [stored]


class _SharedBuffer(DefaultReduceScatter):
    """Use one buffer as input and output of a reduce-scatter on one rank."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the input buffer on the second call of torch's ``foreach_reduce``, which allocates its output."""
        allocated: torch.Tensor | None = sys._getframe(1).f_locals.get("reduce_scatter_input")
        if allocated is None:
            return super().allocate(size, dtype=dtype, device=device)
        if allocated.is_cuda:
            allocated.record_stream(torch.cuda.current_stream(device))
        return allocated
