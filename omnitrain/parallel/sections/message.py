"""The messages that go from one section to another. All ranks know them before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Edge(NamedTuple):
    """Messages go from ``source`` to ``target``, two sections."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"

    @property
    def returned(self) -> Edge:
        """The edge on which the gradients come back."""
        return Edge(self.target, self.source)


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
    # runs of rows and who sends them, by first row. Together they are all rows. A rank may send several.
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        stops = [0, *(part.stop for part in self.parts)]
        if not self.tensors:
            raise ValueError(f"a message to rank {self.receiver} needs at least one tensor")
        for part, before in zip(self.parts, stops, strict=False):
            if part.start != before or part.stop <= part.start:
                raise ValueError(
                    f"{part} of a message to rank {self.receiver} must begin at row {before} and have rows"
                )

    @cached_property
    def rows(self) -> int:
        """The number of rows of each tensor."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return self.rows * sum(rows.bytes for rows in self.tensors)

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return new tensors ``[rows, *shape]``, not initialised."""
        return tuple(torch.empty((self.rows, *shape), dtype=dtype, device=device) for shape, dtype in self.tensors)

    def require(self, part: Part, tensors: Sequence[Tensor]) -> None:
        """Check that ``tensors`` are the rows of a part.

        Raises:
            ValueError: they have other shapes or dtypes.
        """
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [((part.rows, *shape), dtype) for shape, dtype in self.tensors]
        if found != expected:
            raise ValueError(f"rows {part.start} to {part.stop - 1} of a message are {expected}; found {found}")

    def returned(self) -> tuple[Message, ...]:
        """Return the messages that bring the gradients back: one for each part, to its sender."""
        return tuple(Message(part.sender, self.tensors, (Part(self.receiver, 0, part.rows),)) for part in self.parts)


def parts_at(places: np.ndarray, counts: Sequence[int], senders: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts of a message whose rows lie anywhere, as those of a sequence that ranks share.

    Args:
        places: ``[rows]`` int64: the row of the message at which each sent row lies; by sender. Rows of
            :class:`~omnitrain.parallel.step.feature_routing.RowSplits` are in this form (``needed``).
        counts: number of rows from each sender.
        senders: global rank of each sender.
    """
    sender = np.repeat(np.asarray(senders), counts)
    is_first = (np.diff(places, prepend=-2) != 1) | (np.diff(sender, prepend=-1) != 0)
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(firsts, append=len(places))
    runs = zip(sender[firsts].tolist(), places[firsts].tolist(), lengths.tolist(), strict=True)
    return tuple(sorted((Part(rank, start, start + length) for rank, start, length in runs), key=lambda p: p.start))
