"""What a queue needs of a carrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from omnitrain.parallel.sections.message import Message, Part


class Arrival(Protocol):
    """A message on its way to this rank."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait once for all parts, and return the tensors, ``[rows, ...]`` each, or raise LostRankError."""
        ...


class Departure(Protocol):
    """A part of a message on its way to another rank."""

    def wait(self) -> object:
        """Wait until the sent tensors may change. Called once. Raises LostRankError: the receiver has ended."""
        ...


class Carrier(Protocol):
    """Brings the messages of one edge from their senders to their receivers, in the order of their numbers.

    A receiver posts message ``number`` only after it has taken message ``number - slots``.
    """

    def prepare(self, messages: Sequence[Message]) -> None:
        """Take note of all messages of a step, of all ranks, before any of them is posted. Nothing is under way."""
        ...

    def post(self, message: Message, number: int) -> Arrival:
        """Give a message of this rank a place to which its senders may write. Does not wait."""
        ...

    def send(self, tensors: Sequence[Tensor], message: Message, part: Part, number: int) -> Departure:
        """Begin to send a part of a message, which lands at its rows. Does not wait.

        ``tensors``, ``[rows of the part, ...]`` each, contiguous, must not change before the departure has ended.
        ``number`` is that of the message among those of its receiver.
        """
        ...
