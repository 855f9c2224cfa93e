"""FSDP units of one rank, without the copies that torch (2.11 to 2.13) makes where nothing travels.

torch casts the parameters and copies what it cast into the gathered ones; it puts the gradients together in one buffer
and copies that into another. Here parameters are cast into their place, and gradients stay where they were put
together. Of 24 bytes that a unit moves per parameter in a forward and its backward, 12 are spared. Such units are those
of a training on one GPU, and experts of which each rank has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def skip_copy_in_out(unit: FSDPModule) -> None:
    """Do so in a unit whose mesh has one rank. Its parameters are on the device that computes.

    Args:
        unit: fresh from ``fully_shard``.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return  # all its parameters are those of other units
    unit.set_custom_reduce_scatter(_OneBuffer())
    for parameter in group.fsdp_params:
        parameter.__class__ = _CastIntoPlace


class _CastIntoPlace(FSDPParam):
    """Its gathered form is there before torch copies into it, in its dtype: the copy casts."""

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """``[n]``, as it is stored; torch's has the dtype of the gathered form."""
        stored = self._sharded_param_data
        self.init_all_gather_outputs([stored.numel()], [self.param_dtype or stored.dtype], 1, stored.device)
        return [stored]


class _OneBuffer(DefaultReduceScatter):
    """Buffers of a reduction on one rank: what it puts in is what it gets."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Torch's ``foreach_reduce`` asks twice: for its input, and, when it has that, for its output."""
        there: torch.Tensor | None = sys._getframe(1).f_locals.get("reduce_scatter_input")
        if there is None:
            return super().allocate(size, dtype=dtype, device=device)
        if there.is_cuda:
            there.record_stream(torch.cuda.current_stream(device))
        return there
