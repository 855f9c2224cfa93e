"""Any optimizer, with state and master copy of some parameters in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

Groups = list[dict[str, Any]]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Runs an optimizer on fp32 copies of some parameters in host memory, and on the others as they are.

    A step copies gradients out, updates there, and copies the new values back; where parameters have a lower
    precision than fp32, the copy keeps what they round away. State dicts are those of the optimizer without offload:
    a run may go on with the other.

    Attributes:
        inner: the optimizer that updates.
    """

    def __init__(
        self, make: Callable[[Groups], torch.optim.Optimizer], groups: Groups, offloaded: Collection[nn.Parameter]
    ) -> None:
        """Build ``make(groups)`` with stand-ins for ``offloaded``.

        Args:
            make: parameter groups -> the optimizer.
            groups: with ``params`` and options, as any optimizer takes them.
            offloaded: parameters, plain or DTensors; those in host memory already are left as they are.
        """
        taken = {p for p in offloaded if not _is_on_host(p)}
        self._copies = {p: _HostCopy(p) for group in groups for p in group["params"] if p in taken}
        self.inner = make([group | {"params": [self._stand_in(p) for p in group["params"]]} for group in groups])
        super().__init__(groups, self.inner.defaults)
        for own, other in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({name: value for name, value in other.items() if name != "params"})

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._copies[parameter].master if parameter in self._copies else parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update from the gradients of the parameters; None is returned, as no closure may be given."""
        assert closure is None, "a closure would compute gradients twice"
        self._copy_options()
        for copy in self._copies.values():
            copy.fetch()
        _wait(self._copies)
        self.inner.step()
        for copy in self._copies.values():
            copy.write_back()
        self._show_state()

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer without offload has it; ``masters`` beside it where parameters are not fp32."""
        self._copy_options()
        masters = {
            index: self._copies[parameter].master.data
            for index, parameter in enumerate(p for group in self.param_groups for p in group["params"])
            if parameter in self._copies and parameter.dtype != torch.float32
        }
        return self.inner.state_dict() | ({"masters": masters} if masters else {})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, with offload or without."""
        plain = {name: value for name, value in state_dict.items() if name != "masters"}
        self.inner.load_state_dict(plain)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, value in state_dict.get("masters", {}).items():
            if parameters[index] in self._copies:
                self._copies[parameters[index]].load(value)
        for own, other in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({name: value for name, value in other.items() if name != "params"})
        self._show_state()

    def _copy_options(self) -> None:
        """Options such as the learning rate are set on this optimizer's groups."""
        for own, other in zip(self.param_groups, self.inner.param_groups, strict=True):
            other.update({name: value for name, value in own.items() if name != "params"})

    def _show_state(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.inner.state.get(self._stand_in(parameter))
                if state is not None:
                    self.state[parameter] = state


class _HostCopy:
    """The fp32 values of one parameter in host memory."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._is_pinned = parameter.device.type == "cuda"
        self._gradient: Tensor | None = None
        self.master = nn.Parameter(_like(parameter, self._host(_local(parameter.detach()))))
        self._version = self._current_version()

    def fetch(self) -> None:
        """Take over the gradient, and the values if someone else changed them since the last step."""
        if self._current_version() != self._version:
            _local(self.master.data).copy_(_local(self._parameter.detach()), non_blocking=self._is_pinned)
        if self._parameter.grad is None:
            self.master.grad = None
            return
        gradient = _local(self._parameter.grad)
        if self._gradient is None:
            self._gradient = self._host(gradient)
        else:
            self._gradient.copy_(gradient, non_blocking=self._is_pinned)
        self.master.grad = _like(self._parameter, self._gradient)

    def write_back(self) -> None:
        """The parameter gets the new values, rounded to its precision."""
        _local(self._parameter.detach()).copy_(_local(self.master.data), non_blocking=self._is_pinned)
        self._version = self._current_version()

    def load(self, master: Tensor) -> None:
        """Values of an earlier run; the parameter has their rounded ones."""
        _local(self.master.data).copy_(_local(master))
        self._version = self._current_version()

    def _host(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, dtype=torch.float32, device="cpu", pin_memory=self._is_pinned)
        return host.copy_(tensor)

    def _current_version(self) -> int:
        return _local(self._parameter.detach())._version


def _wait(copies: Collection[nn.Parameter]) -> None:
    """Copies to the host are complete."""
    for device in {parameter.device for parameter in copies if parameter.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """``local`` as a DTensor where ``parameter`` is one; its mesh may be of another device than its values."""
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _is_on_host(parameter: nn.Parameter) -> bool:
    """Parameters of an offloaded FSDP unit: their mesh is of a device, their values are not."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type
