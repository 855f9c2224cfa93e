"""Broadcast the weights of rank 0, unit by unit: other ranks never hold more than one whole unit.

First, all ranks move the model to the meta device, where tensors take no memory. Then rank 0 broadcasts each tensor of
a unit, each rank keeps its shard, and the unit is sharded before the next one is broadcast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors

from omnitrain.ops.collectives import gathered_objects

SOURCE = 0  # the rank that holds the weights


class BroadcastLoader:
    """Take the weights of a model off rank 0, to broadcast them later. All ranks must create it.

    Args:
        model: the same on all ranks; rank 0 has its weights. Afterwards its parameters are on the meta device, and
            every rank has the buffers of rank 0. Until :meth:`fill`, parameters can be cast to other dtypes.
        device: device for the broadcasts.

    Attributes:
        absent: names of the parameters that other pipeline stages hold: they stay on the meta device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self.absent: Collection[str] = ()
        self._whole: dict[str, Tensor] = {}
        # Rank 0 knows the dtypes of the checkpoint; a model built without weights does not.
        dtypes = gathered_objects({name: parameter.dtype for name, parameter in model.named_parameters()})[SOURCE]
        _take_buffers(model)
        for name, parameter in model.named_parameters():
            on_meta = torch.empty_like(parameter, device="meta", dtype=dtypes[name])
            swapped = nn.Parameter(on_meta, parameter.requires_grad)
            swap_tensors(parameter, swapped)  # every reference to the parameter now sees the meta tensor
            if dist.get_rank() == SOURCE:
                self._whole[name] = swapped.detach()

    @cached_property
    def _left(self) -> dict[nn.Parameter, str]:
        """The parameters to broadcast, and their names.

        Computed at the first use, when tensor parallelism has replaced some parameters under the same names.
        """
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def fill(self, module: nn.Module) -> None:
        """Broadcast the weights of a module; each rank keeps its shard. All ranks must call it."""
        for parameter in module.parameters():
            if parameter in self._left:
                # No reference stays, which would keep the whole tensor alive after it is sharded.
                name = self._left.pop(parameter)
                if name in self.absent:
                    self._broadcast(parameter, name)
                else:
                    swap_tensors(parameter, nn.Parameter(self._broadcast(parameter, name), parameter.requires_grad))

    @torch.no_grad()
    def _broadcast(self, parameter: nn.Parameter, name: str) -> Tensor:
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device)
        if dist.get_rank() == SOURCE:
            whole.copy_(self._whole.pop(name))  # casts to the planned dtype
        sent = whole.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), SOURCE)
        whole.copy_(sent)
        if not isinstance(parameter, DTensor):
            return whole
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()


def ranks_without_weights(model: nn.Module) -> list[bool]:
    """Return for each rank whether its model is on the meta device; all ranks must call this."""
    return gathered_objects(any(parameter.is_meta for parameter in model.parameters()))


def _take_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 to all ranks, with tensors that modules keep as plain attributes."""
    sent = [{(path, name): value.cpu() for path, name, value in _buffers(model)} if dist.get_rank() == SOURCE else None]
    dist.broadcast_object_list(sent, SOURCE)
    for (path, name), value in (sent[0] or {}).items():
        module = model.get_submodule(path)
        holder = module._buffers if name in module._buffers else vars(module)
        holder[name] = value


def _buffers(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor):
                yield path, name, value
