"""Gradients of zeros that all ranks need so that they reduce the same ones, and that no sample of a step gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.peers import Peers


class GivesZeros(Protocol):
    """Gives zeros to parameters that a rank's samples do not read; ``read``: keys of those that samples have read."""

    read: set[Any]

    def parameters_by_key(self) -> Mapping[Any, Iterable[nn.Parameter]]:
        """Return key -> parameters that samples read together, in the same order on all ranks of a section."""


class ZerosInStep:
    """The gradients of zeros that ``givers`` give in an optimizer step: create it before the first forward."""

    def __init__(self, givers: Sequence[GivesZeros]) -> None:
        self._givers = givers
        for giver in givers:
            giver.read.clear()
        self._without = {p for own in self._parameters() for p in own if p.grad is None}

    def drop_gradients(self, peers: Peers) -> None:
        """Remove the gradients of zeros of parameters that no sample of any rank read; all ``peers`` call this."""
        is_read = [key in giver.read for giver in self._givers for key in giver.parameters_by_key()]
        for own, anywhere in zip(self._parameters(), peers.any_of_each(is_read), strict=True):
            for parameter in () if anywhere else self._without.intersection(own):
                parameter.grad = None

    def _parameters(self) -> list[Iterable[nn.Parameter]]:
        return [own for giver in self._givers for own in giver.parameters_by_key().values()]


def with_zeros_for(output: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Return ``output``; its backward gives zeros to ``others``, too. All ranks then recompute blocks in one order."""
    return _WithZeros.apply(output, *others)


class _WithZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(output.new_empty(0))
        ctx.zeros = [_zeros_for(other) if other.requires_grad else None for other in others]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return gradients[0], *(zeros and zeros(gradients[0]) for zeros in ctx.zeros)


def _zeros_for(other: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that makes zeros, sharded as ``other`` is; parameters get them on its argument's device."""
    shape, dtype, device = other.shape, other.dtype, other.device
    if not other.is_leaf:  # no memory
        return lambda near: torch.zeros((), dtype=dtype, device=device).expand(shape)
    if not isinstance(other, DTensor):
        return lambda near: near.new_zeros(shape, dtype=dtype)
    mesh, placements, stride, own = other.device_mesh, other.placements, other.stride(), other.to_local().shape
    return lambda near: DTensor.from_local(
        near.new_zeros(own, dtype=dtype), mesh, placements, run_check=False, shape=shape, stride=stride
    )
