"""Messages from one section to another, all known to all ranks before anything moves, and the protocol of carriers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Ends(NamedTuple):
    """Two sections: messages go from ``source`` to ``target``."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"

    @property
    def returned(self) -> Ends:
        """The ends of the messages that bring gradients back."""
        return Ends(self.target, self.source)


class Part(NamedTuple):
    """Rows ``start .. stop - 1`` of a message, which the global rank ``sender`` sends."""

    sender: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


class Rows(NamedTuple):
    """One tensor of a message: the shape of a row, and the dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Message:
    """What one rank receives at once: tensors with equally many rows, from one or more ranks."""

    receiver: int  # global rank
    tensors: tuple[Rows, ...]  # the shape of a row and the dtype of each tensor
    # runs of rows and their senders, by first row. Together they are all rows. A rank may send several.
    parts: tuple[Part, ...]

    @cached_property
    def rows(self) -> int:
        """The number of rows of each tensor."""
        return self.parts[-1].stop if self.parts else 0

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return new tensors ``[rows, *shape]``, not initialised."""
        return tuple(torch.empty((self.rows, *shape), dtype=dtype, device=device) for shape, dtype in self.tensors)

    def require(self, part: Part, tensors: Sequence[Tensor]) -> None:
        """Check that ``tensors`` are the rows of a part. Raises ValueError: they have other shapes or dtypes."""
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [((part.rows, *shape), dtype) for shape, dtype in self.tensors]
        if found != expected:
            raise ValueError(f"rows {part.start} to {part.stop - 1} of a message are {expected}; found {found}")

    def returned(self, tensors: tuple[Rows, ...]) -> tuple[Message, ...]:
        """Return the messages that bring gradients of these rows back: one for each part, to its sender."""
        return tuple(Message(part.sender, tensors, (Part(self.receiver, 0, part.rows),)) for part in self.parts)


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
