"""Give each rank its shards of the weights, unit by unit: no rank holds the model.

All ranks move the model to the meta device. The first rank says how each parameter is made of tensors in files
(:mod:`omnitrain.models.hf.stored_values`), and each rank puts that description in the parameter's place. Tensor
parallelism and FSDP slice it like any tensor, and what FSDP copies into its shard is read from the files. Parameters
that are in no file, and all if some rank lacks the files, are broadcast from the first rank, unit by unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors

from omnitrain.models.hf.stored_tensor import StoredTensor, replace_value
from omnitrain.models.hf.stored_values import FILES, InFile, StoredValue, cast, leaves_of
from omnitrain.ops.collectives import gathered_objects
from omnitrain.torch_private import buffers_of

T = TypeVar("T")

_SAMPLE_BYTES = 4096


class WeightLoader:
    """Take the weights off a model, to load each unit later. All ranks of the group must create it.

    The first rank has the weights of ``model``, or knows their files. Afterwards its parameters are on the meta device,
    and every rank has the buffers of the first. Until :meth:`fill`, parameters can be cast to other dtypes. Parameters
    ``elsewhere``, in other sections only, are not loaded.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, group: dist.ProcessGroup, elsewhere: Collection[str] = ()
    ) -> None:
        self._model, self._device, self._group, self._elsewhere = model, device, group, frozenset(elsewhere)
        self._is_first = dist.get_rank(group) == 0
        self.absent: Collection[str] = ()
        self._whole: dict[str, Tensor] = {}
        # The first rank knows the dtypes of the checkpoint; a model built without weights does not.
        named = dict(model.named_parameters())
        stored = {
            name: parameter.value
            for name, parameter in named.items()
            if isinstance(parameter, StoredTensor) and parameter.is_in_files
        }
        dtypes, self._stored = _sent(({name: p.dtype for name, p in named.items()}, stored), group)
        if not _has_all_files(self._stored, group):
            self._stored = {}
        self._take_buffers()
        del stored
        for name, parameter in named.items():
            on_meta = torch.empty_like(parameter, device="meta", dtype=dtypes[name])
            swapped = nn.Parameter(on_meta, parameter.requires_grad)
            swap_tensors(parameter, swapped)  # every reference to the parameter now sees the meta tensor
            if self._is_first and name not in self._elsewhere and name not in self._stored:
                self._whole[name] = swapped.detach()

    @cached_property
    def _left(self) -> dict[nn.Parameter, str]:
        """The parameters to load, and their names.

        Computed at the first use, when tensor parallelism has replaced some parameters under the same names.
        """
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def fill(self, module: nn.Module) -> None:
        """Put the weights of a module in place, to be sharded now. All ranks must call it.

        A weight is either in memory, or a ``StoredTensor``; copying a slice of one reads only that slice from disk.
        """
        for parameter in module.parameters():
            # No reference stays, which would keep the whole tensor alive after it is sharded.
            name = self._left.pop(parameter, None)
            if name is None or name in self._elsewhere:
                continue
            if name in self._stored:
                whole: Tensor = StoredTensor(cast(self._stored.pop(name), parameter.dtype), self._device)
            else:
                whole = self._broadcast(parameter, name)
            if name not in self.absent:
                replace_value(parameter, _own(parameter, whole))
            del whole

    def finish(self) -> None:
        """Read the parameters that no unit has, and close the files."""
        for parameter in self._model.parameters():
            if isinstance(parameter, StoredTensor):
                replace_value(parameter, parameter.read())
        FILES.close()

    @torch.no_grad()
    def _broadcast(self, parameter: nn.Parameter, name: str) -> Tensor:
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device)
        if self._is_first:
            whole.copy_(self._whole.pop(name))  # casts to the planned dtype
        sent = whole.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), group=self._group, group_src=0)
        whole.copy_(sent)
        return whole

    def _take_buffers(self) -> None:
        """Copy the buffers of the first rank to all ranks, with tensors that modules keep as plain attributes."""
        found = {
            (path, name): value.cpu()
            for path, module in (self._model.named_modules() if self._is_first else ())
            for name, value in (*buffers_of(module).items(), *vars(module).items())
            if isinstance(value, Tensor)
        }
        for (path, name), value in _sent(found, self._group).items():
            module = self._model.get_submodule(path)
            holder = buffers_of(module) if name in buffers_of(module) else vars(module)
            holder[name] = value


Where: TypeAlias = Literal["meta", "files", "memory"]


def where_weights_are(model: nn.Module) -> list[Where]:
    """Return where each rank's weights are: nowhere (meta device), in files, or in memory; all ranks must call this."""
    own: Where = "memory"
    if any(isinstance(parameter, StoredTensor) for parameter in model.parameters()):
        own = "files"
    elif any(parameter.is_meta for parameter in model.parameters()):
        own = "meta"
    return gathered_objects(own)


def _sent(own: T, group: dist.ProcessGroup) -> T:
    """Return the value of the group's first rank."""
    sent = [own]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    return sent[0]


def _has_all_files(stored: Mapping[str, StoredValue], group: dist.ProcessGroup) -> bool:
    """Whether all ranks have the files of these values, with the same content as far as samples show."""
    files = sorted({leaf.file for value in stored.values() for leaf in leaves_of(value) if isinstance(leaf, InFile)})
    by_rank = gathered_objects([_digest(Path(file)) for file in files], group)
    return all(of_rank == by_rank[0] for of_rank in by_rank)


def _digest(file: Path) -> str | None:
    """A digest of a safetensors file's size, its header, and bytes from three places; None: there is no such file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = opened.read(8)
            found = hashlib.sha256(length + size.to_bytes(8, "little"))
            found.update(opened.read(int.from_bytes(length, "little")))
            for place in (opened.tell(), (opened.tell() + size) // 2, max(size - _SAMPLE_BYTES, 0)):
                opened.seek(place)
                found.update(opened.read(_SAMPLE_BYTES))
    except OSError:
        return None
    return found.hexdigest()


def _own(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's part of a parameter that tensor or expert parallelism has sharded, else ``whole``."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()
