"""Broadcast the weights of a section's first rank, unit by unit: other ranks never hold more than one whole unit.

First, all ranks move the model to the meta device, where tensors take no memory. Then the first rank broadcasts each
tensor of a unit, each rank keeps its shard, and the unit is sharded before the next one is broadcast.
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


class BroadcastLoader:
    """Take the weights of a model off the first rank, to broadcast them later. All ranks of the group must create it.

    Args:
        model: the same on all ranks; the first one has its weights. Afterwards its parameters are on the meta device,
            and every rank has the buffers of the first. Until :meth:`fill`, parameters can be cast to other dtypes.
        device: device for the broadcasts.
        group: the ranks of a section.
        elsewhere: names of the parameters that only other sections hold: they are not broadcast.

    Attributes:
        absent: names of the parameters that this rank does not hold: they stay on the meta device.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, group: dist.ProcessGroup, elsewhere: Collection[str] = ()
    ) -> None:
        self._model, self._device, self._group, self._elsewhere = model, device, group, frozenset(elsewhere)
        self._is_first = dist.get_rank(group) == 0
        self.absent: Collection[str] = ()
        self._whole: dict[str, Tensor] = {}
        # The first rank knows the dtypes of the checkpoint; a model built without weights does not.
        own = {name: parameter.dtype for name, parameter in model.named_parameters()}
        dtypes = gathered_objects(own, group)[0]
        self._take_buffers()
        for name, parameter in model.named_parameters():
            on_meta = torch.empty_like(parameter, device="meta", dtype=dtypes[name])
            swapped = nn.Parameter(on_meta, parameter.requires_grad)
            swap_tensors(parameter, swapped)  # every reference to the parameter now sees the meta tensor
            if self._is_first and name not in self._elsewhere:
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
                if name in self._elsewhere:
                    continue
                if name in self.absent:
                    self._broadcast(parameter, name)
                else:
                    swap_tensors(parameter, nn.Parameter(self._broadcast(parameter, name), parameter.requires_grad))

    @torch.no_grad()
    def _broadcast(self, parameter: nn.Parameter, name: str) -> Tensor:
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device)
        if self._is_first:
            whole.copy_(self._whole.pop(name))  # casts to the planned dtype
        sent = whole.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), group=self._group, group_src=0)
        whole.copy_(sent)
        if not isinstance(parameter, DTensor):
            return whole
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()

    def _take_buffers(self) -> None:
        """Copy the buffers of the first rank to all ranks, with tensors that modules keep as plain attributes."""
        found = _buffers(self._model) if self._is_first else ()
        sent = [{(path, name): value.cpu() for path, name, value in found}]
        dist.broadcast_object_list(sent, group=self._group, group_src=0)
        for (path, name), value in sent[0].items():
            module = self._model.get_submodule(path)
            holder = module._buffers if name in module._buffers else vars(module)
            holder[name] = value


def ranks_without_weights(model: nn.Module) -> list[bool]:
    """Return for each rank whether its model is on the meta device; all ranks must call this."""
    return gathered_objects(any(parameter.is_meta for parameter in model.parameters()))


def _buffers(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor):
                yield path, name, value
