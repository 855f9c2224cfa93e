"""Weights that one rank has are handed out to all: no other ever has more of them whole than one unit.

Before, all ranks lay the model out on the meta device, where tensors have no memory. Then each unit's tensors travel
whole, one after the other, each rank keeps its part, and the unit is sharded before the next one comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors

from omnitrain.ops.collectives import gathered_objects

SOURCE = 0  # the rank that has them


class BroadcastLoader:
    """The weights of a model, whole on rank 0.

    Args:
        model: the same on all ranks, on rank 0 with its weights. It is on the meta device afterwards, but for buffers,
            of which every rank has those of rank 0; until it is filled, its parameters can be given other dtypes. All
            ranks call this.
        device: on which tensors travel.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._whole: dict[str, Tensor] = {}
        # Those of rank 0: a model that was built without weights does not know in which its file has them.
        dtypes = gathered_objects({name: parameter.dtype for name, parameter in model.named_parameters()})[SOURCE]
        _take_buffers(model)
        for name, parameter in model.named_parameters():
            bare = torch.empty_like(parameter, device="meta", dtype=dtypes[name])
            held = nn.Parameter(bare, parameter.requires_grad)
            swap_tensors(parameter, held)  # whoever has the parameter has the bare one now
            if dist.get_rank() == SOURCE:
                self._whole[name] = held.detach()

    @cached_property
    def _names(self) -> dict[nn.Parameter, str]:
        """When the first ones are asked for: some have been replaced by parts until then, under the same names."""
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def fill(self, module: nn.Module) -> None:
        """Give a module of the model its weights: of each what this rank shall have of it. All ranks call it."""
        for parameter in module.parameters():
            if parameter.is_meta:
                swap_tensors(parameter, nn.Parameter(self._received(parameter), parameter.requires_grad))

    @torch.no_grad()
    def _received(self, parameter: nn.Parameter) -> Tensor:
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device)
        if dist.get_rank() == SOURCE:
            # Out of both: what would hold a parameter would hold it whole behind its sharding.
            whole.copy_(self._whole.pop(self._names.pop(parameter)))  # in the dtype that it shall have
        travelling = whole.contiguous()
        dist.broadcast(travelling.view(-1).view(torch.uint8), SOURCE)
        whole.copy_(travelling)
        if not isinstance(parameter, DTensor):
            return whole
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()


def ranks_without_weights(model: nn.Module) -> list[bool]:
    """Of each rank whether its model is on the meta device; all of them call this."""
    return gathered_objects(any(parameter.is_meta for parameter in model.parameters()))


def _take_buffers(model: nn.Module) -> None:
    """Those of rank 0, with tensors that are buffers in all but registration."""
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
