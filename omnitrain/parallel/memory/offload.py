"""Offload activations to host memory until the backward; the copies overlap with computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from omnitrain.torch_private import storage_of, version_of

_SMALL = 4096  # bytes; a copy of less costs more than it frees


# The contexts of calls that are running, of this thread: a backward may recompute a module while its forward runs.
_entered: ContextVar[tuple[tuple[nn.Module, ExitStack], ...]] = ContextVar("contexts_around_calls", default=())


def around_calls(
    module: nn.Module, make: Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
) -> None:
    """Run each call of ``module`` inside the context that ``make`` returns for its arguments."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with ExitStack() as stack:
            stack.enter_context(make(args, kwargs))
            _entered.set((*_entered.get(), (module, stack.pop_all())))

    def leave(*_: object) -> None:
        *outer, (of, stack) = _entered.get() or ((None, None),)
        if of is module and stack is not None:
            _entered.set(tuple(outer))
            stack.close()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


# The last call of this thread whose tensors were offloaded; the backward runs calls in the reverse order.
_last_call: ContextVar[weakref.ref[_OffloadedCall] | None] = ContextVar("last_offloaded_call", default=None)


class ActivationOffload:
    """Copy tensors that autograd saves in blocks to host memory, and back before the backward needs them.

    On CUDA the copies run on a separate stream with pinned memory: out while later blocks compute, in while the
    backward of the next block runs. Parameters are not offloaded: a sharded model gathers them again.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attach(self, block: nn.Module) -> None:
        """Offload the tensors that each call of ``block`` saves; for a checkpointed block use :meth:`saving`."""
        around_calls(block, lambda args, kwargs: self.saving(block))

    def saving(self, block: nn.Module) -> AbstractContextManager[None]:
        """Offload tensors that autograd saves inside the context, except parameters of ``block``."""

        def is_activation(storage: int) -> bool:  # read at each call: an inner FSDP unit gathers its parameters late
            return all(storage_of(parameter) != storage for parameter in block.parameters())

        return self._saved(is_activation)

    def saving_only(self, tensor: Tensor) -> AbstractContextManager[None]:
        """Offload only saved tensors that share the storage of ``tensor``."""
        wanted = storage_of(tensor)
        return self._saved(lambda storage: storage == wanted)

    @contextmanager
    def _saved(self, is_wanted: Callable[[int], bool]) -> Iterator[None]:
        call = _OffloadedCall(self, is_wanted, _last_call.get())
        _last_call.set(weakref.ref(call))
        with saved_tensors_hooks(call.pack, call.unpack):
            yield
        call.close()

    def is_taken(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is on the device and large enough to offload."""
        return tensor.device.type == self._device.type and tensor.nbytes >= _SMALL

    def out(self, tensor: Tensor) -> Tensor:
        """Copy to host memory; on CUDA the copy is queued on the offload stream."""
        self.num_bytes += tensor.nbytes
        if self._stream is None:
            return tensor.detach().clone()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)  # the allocator must not reuse its memory before the copy
        return host

    def back(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copy back to the device; return the tensor and the CUDA event of its completion."""
        if self._stream is None:
            return host, None
        tensor = torch.empty_like(host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still use the new memory
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
            event = self._stream.record_event()
        tensor.record_stream(self._stream)
        return tensor, event


class _OffloadedCall:
    """The saved tensors of one call, and a reference to the previous call."""

    def __init__(
        self, offload: ActivationOffload, is_wanted: Callable[[int], bool], previous: weakref.ref[_OffloadedCall] | None
    ) -> None:
        self.offload = offload
        self._is_wanted = is_wanted
        self._previous = previous
        self._saved: list[weakref.ref[_Saved]] = []
        # Keeps the tensors alive, so that no other tensor can get the same key.
        self._seen: dict[tuple[Any, ...], tuple[Tensor, _Saved]] = {}
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = storage_of(tensor)
        if not self.offload.is_taken(tensor) or not self._is_wanted(storage):
            return tensor
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor))
        if key not in self._seen:
            saved = _Saved(self, self.offload.out(tensor))
            self._saved.append(weakref.ref(saved))
            self._seen[key] = tensor, saved
        return self._seen[key][1]

    def unpack(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.fetch()
        return packed.tensor()

    def close(self) -> None:
        """End the call; it saves no more tensors."""
        self._seen.clear()

    def fetch(self) -> None:
        """Copy all tensors back that autograd still needs, once."""
        if self._is_fetched:
            return
        self._is_fetched = True
        for reference in self._saved:
            if (saved := reference()) is not None:
                saved.fetch()


class _Saved:
    """A tensor in host memory, alive as long as autograd needs it."""

    def __init__(self, call: _OffloadedCall, host: Tensor) -> None:
        self._call = call  # keeps the call alive as long as one of its tensors
        self._host = host
        self._ready: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fetch(self) -> None:
        self._ready = self._call.offload.back(self._host)

    def tensor(self) -> Tensor:
        assert self._ready is not None
        tensor, event = self._ready
        if event is not None:
            torch.cuda.current_stream(tensor.device).wait_event(event)
        return tensor
