"""Bring messages with torch's point-to-point operations: gloo tells them apart by tags, NCCL by their order."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import LostRankError
from omnitrain.groups import new_group
from omnitrain.parallel.sections.message import Message, Part

_TENSOR_BITS = 8  # of a tag; the others count messages
_MESSAGE_BITS = 22
_CTAS = 4  # of a kernel of NCCL between sections: it may wait long, and then occupies these multiprocessors


@dataclass
class Transfer:
    """Tensors that are on their way between this rank and another."""

    # those that were sent, which must not change before :meth:`wait`; or buffers, valid after it
    tensors: tuple[Tensor, ...]
    peer: int  # global rank at the other end
    _works: list[dist.Work] = field(repr=False)

    @classmethod
    def here(cls, tensors: Iterable[Tensor]) -> Transfer:
        """Return tensors of this rank for this rank as a transfer that has ended."""
        return cls(tuple(tensors), -1, [])

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Wait until the tensors are at the other end, and return them. On a GPU, only the current stream waits.

        After ``timeout_s`` seconds (None: the group's), gloo breaks all connections of the group. Raises LostRankError.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._works:  # each is waited for once: a second wait for a send of gloo never ends
            with _named(self.peer, until, timeout_s):
                self._works[0].wait(*([] if until is None else [_left(until)]))
            del self._works[0]
        return self.tensors

    @property
    def has_ended(self) -> bool:
        """Whether the tensors are at the other end; gloo knows this only after :meth:`wait`."""
        return all(work.is_completed() for work in self._works)


def send_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, peer: int, number: int) -> Transfer:
    """Begin to send a message's tensors, not to be changed before the end; ``number`` is below 2**22 on both sides."""
    return _begun(dist.isend, [tensor.detach().contiguous() for tensor in tensors], group, peer, number)


def receive_tensors(buffers: Sequence[Tensor], group: dist.ProcessGroup, peer: int, number: int) -> Transfer:
    """Post the receives of a message (:func:`send_tensors`) from ``peer`` into contiguous ``buffers``."""
    return _begun(dist.irecv, list(buffers), group, peer, number)


def _begun(
    operation: Callable[..., Any], tensors: list[Tensor], group: dist.ProcessGroup, peer: int, number: int
) -> Transfer:
    """The tensors of a message are one batch, one kernel of NCCL, whose group must be connected."""
    rank = dist.get_global_rank(group, peer)
    batch = [
        dist.P2POp(operation, tensor, group=group, tag=number << _TENSOR_BITS | index, group_peer=peer)
        for index, tensor in enumerate(tensors)
    ]
    with _named(rank):
        works = dist.batch_isend_irecv(batch) if batch else []
    return Transfer(tuple(tensors), rank, works)


def _left(until: float) -> timedelta:
    """Whole milliseconds, as torch rounds down: a wait that ends before ``until`` looks like a broken connection."""
    return timedelta(milliseconds=max(1, math.ceil(1e3 * (until - time.monotonic()))))


def connect(group: dist.ProcessGroup, senders: Sequence[int], receivers: Sequence[int], device: torch.device) -> None:
    """Send a number from each sender to each receiver, so that no later message waits on the host for its other end.

    NCCL makes the connection of two ranks at the first message from one to the other, and both wait for it; its
    collectives use connections of their own. All ranks of ``group`` call this, in the same order relative to other
    groups; ``senders`` and ``receivers`` are global, and disjoint.
    """
    is_sender = dist.get_rank() in senders
    operation, peers = (dist.isend, receivers) if is_sender else (dist.irecv, senders)
    number = torch.zeros(1, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, number.clone(), peer, group) for peer in peers]):
        work.wait()


@contextmanager
def _named(peer: int, until: float | None = None, timeout_s: float | None = None) -> Iterator[None]:
    """Name the rank at the other end of a connection that breaks, or that is silent at time ``until``."""
    try:
        yield
    except RuntimeError as error:
        if until is not None and time.monotonic() >= until:
            raise LostRankError(f"rank {peer} did nothing for {timeout_s:g} s", peer) from error
        reason = next(iter(str(error).splitlines()), "")
        raise LostRankError(f"rank {peer} is gone (killed, or its connection broke: {reason})", peer) from error


@dataclass
class _Gathered:
    """A message whose parts come from several ranks."""

    tensors: tuple[Tensor, ...]
    parts: Sequence[Transfer]

    def wait(self) -> tuple[Tensor, ...]:
        for part in self.parts:
            part.wait()
        return self.tensors


class TorchCarrier:
    """:class:`~omnitrain.parallel.sections.message.Carrier` over process groups.

    Both ends of each message post it in the order of the edge's messages, which is one order for all ranks: so no two
    ranks wait for each other, though NCCL runs what a rank posts in a group one after the other. So only the first of
    the receives that are posted ahead occupies multiprocessors until its message comes, a few of them; the others wait
    in the stream of the group, which this direction of this edge uses alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._numbers: Counter[int] = Counter()  # of parts to or from a rank; both ends count alike

    def prepare(self, messages: Sequence[Message]) -> None:
        """Do nothing: each message gets memory of its own."""

    def post(self, message: Message, number: int) -> _Gathered:
        """Post the receives of all parts, each into its rows of new tensors."""
        tensors = message.empty(self._device)
        parts = [
            receive_tensors([tensor[part.start : part.stop] for tensor in tensors], *self._next(part.sender))
            for part in message.parts
        ]
        return _Gathered(tensors, parts)

    def send(self, tensors: Sequence[Tensor], message: Message, part: Part, number: int) -> Transfer:
        """Begin to send a part of a message."""
        return send_tensors(tensors, *self._next(message.receiver))

    def _next(self, rank: int) -> tuple[dist.ProcessGroup, int, int]:
        """The group, the other end's rank in it, and the number of the next part."""
        number = self._numbers[rank] % (1 << _MESSAGE_BITS)
        self._numbers[rank] += 1
        assert self._group is not None
        return self._group, dist.get_group_rank(self._group, rank), number


def torch_carrier(senders: Sequence[int], receivers: Sequence[int], device: torch.device) -> TorchCarrier:
    """Make an edge's carrier, of gloo or NCCL. All ranks of the world call it, in one order with other groups."""
    members = sorted({*senders, *receivers})
    if device.type == "cpu":
        return TorchCarrier(new_group(members, "section_edge", "gloo"), device)
    group = new_group(members, "section_edge", "nccl", max_ctas=_CTAS)
    if group is not None:
        connect(group, senders, receivers, device)
    return TorchCarrier(group, device)
