"""Run any optimizer with the state and master copies of some parameters in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.optim.adamw import local_shard
from omnitrain.torch_private import DTensorSpec, TensorMeta, version_of

Groups = list[dict[str, Any]]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Runs an optimizer on fp32 copies of some parameters in host memory, and directly on the other parameters.

    The copies keep digits that parameters round away. State dicts are those of the optimizer without offload.
    """

    def __init__(
        self, make: Callable[[Groups], torch.optim.Optimizer], groups: Groups, offloaded: Collection[nn.Parameter]
    ) -> None:
        """Build ``make(groups)`` with stand-ins for ``offloaded``, except for parameters in host memory."""
        # Of what FSDP offloads, the mesh is on a device, but the values are in host memory.
        copied = {p for p in offloaded if not isinstance(p, DTensor) or p.device_mesh.device_type == p.device.type}
        self._copies = {p: _HostCopy(p) for group in groups for p in group["params"] if p in copied}
        self.inner = make([group | {"params": [self.stand_in(p) for p in group["params"]]} for group in groups])
        super().__init__(groups, self.inner.defaults)
        self._copy_options(self.inner, self)

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 copy of a parameter, or the parameter itself if it has none."""
        return self._copies[parameter].master if parameter in self._copies else parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters from their gradients. ``closure`` must be None, and None is returned."""
        assert closure is None, "a closure would compute gradients twice"
        self._copy_options(self, self.inner)
        for copy in self._copies.values():
            copy.fetch()
        for device in {parameter.device for parameter in self._copies if parameter.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()  # the copies to the host must be complete
        self.inner.step()
        for copy in self._copies.values():
            copy.write_back()
        self._show_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer without offload, plus ``masters`` for parameters that are not fp32."""
        self._copy_options(self, self.inner)
        masters = {
            index: self._copies[parameter].master.data
            for index, parameter in enumerate(p for group in self.param_groups for p in group["params"])
            if parameter in self._copies and parameter.dtype != torch.float32
        }
        return self.inner.state_dict() | ({"masters": masters} if masters else {})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, saved with or without offload."""
        plain = {name: value for name, value in state_dict.items() if name != "masters"}
        self.inner.load_state_dict(plain)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, value in state_dict.get("masters", {}).items():
            if parameters[index] in self._copies:
                self._copies[parameters[index]].load(value)
        self._copy_options(self.inner, self)
        self._show_state()

    @staticmethod
    def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        """Copy options of groups, such as the learning rate, which callers set on this optimizer's groups."""
        for given, group in zip(source.param_groups, target.param_groups, strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})

    def _show_state(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.inner.state.get(self.stand_in(parameter))
                if state is not None:
                    self.state[parameter] = state


class _HostCopy:
    """The fp32 values of one parameter in host memory."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._is_pinned = parameter.device.type == "cuda"
        self._gradient: Tensor | None = None
        self.master = nn.Parameter(like_parameter(parameter, self._host(local_shard(parameter.detach()))))
        self._version = self._current_version()

    def fetch(self) -> None:
        """Copy the gradient to the host, and the values if other code changed them since the last step."""
        if self._current_version() != self._version:
            local_shard(self.master.data).copy_(local_shard(self._parameter.detach()), non_blocking=self._is_pinned)
        if self._parameter.grad is None:
            self.master.grad = None
            return
        gradient = local_shard(self._parameter.grad)
        if self._gradient is None:
            self._gradient = self._host(gradient)
        else:
            self._gradient.copy_(gradient, non_blocking=self._is_pinned)
        self.master.grad = like_parameter(self._parameter, self._gradient)

    def write_back(self) -> None:
        """Copy the new values to the parameter, rounded to its precision."""
        local_shard(self._parameter.detach()).copy_(local_shard(self.master.data), non_blocking=self._is_pinned)
        self._version = self._current_version()

    def load(self, master: Tensor) -> None:
        """Load fp32 values of an earlier run. The parameter already has the rounded values."""
        local_shard(self.master.data).copy_(local_shard(master))
        self._version = self._current_version()

    def _host(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, dtype=torch.float32, device="cpu", pin_memory=self._is_pinned)
        return host.copy_(tensor)

    def _current_version(self) -> int:
        return version_of(local_shard(self._parameter.detach()))


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap ``local`` as a DTensor if ``parameter`` is one. The mesh may be on another device than the values."""
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)
