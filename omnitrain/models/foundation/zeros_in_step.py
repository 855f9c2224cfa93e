"""Gradients of zeros that all ranks need so that they reduce the same ones, and that no sample of a step gave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from omnitrain.peers import Peers


class GivesZeros(Protocol):
    """Gives gradients of zeros to parameters that a rank's samples do not read.

    Attributes:
        read: keys of the parameters that a sample of this rank has read since it was cleared.
    """

    read: set[Any]

    def parameters_by_key(self) -> Mapping[Any, Iterable[nn.Parameter]]:
        """Return key -> parameters that samples read together, in the same order on all ranks of a section."""
        ...


class ZerosInStep:
    """The gradients of zeros of an optimizer step: create it before the first forward.

    Args:
        givers: what gives gradients of zeros.
    """

    def __init__(self, givers: Sequence[GivesZeros]) -> None:
        self._givers = givers
        for giver in givers:
            giver.read.clear()
        self._without = {p for own in self._parameters() for p in own if p.grad is None}

    def drop_gradients(self, peers: Peers) -> None:
        """Remove the gradients of zeros that this step gave to parameters which no sample of any rank read.

        ``peers``: all ranks of this one's section; all of them call this.
        """
        is_read = [key in giver.read for giver in self._givers for key in giver.parameters_by_key()]
        for own, anywhere in zip(self._parameters(), peers.any_of_each(is_read), strict=True):
            for parameter in () if anywhere else self._without.intersection(own):
                parameter.grad = None

    def _parameters(self) -> list[Iterable[nn.Parameter]]:
        return [own for giver in self._givers for own in giver.parameters_by_key().values()]
