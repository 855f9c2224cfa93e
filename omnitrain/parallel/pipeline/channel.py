"""Send tensors between the stages of a pipeline. Both sides know all shapes, so nothing else is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from omnitrain.errors import LostRankError

Direction = tuple[str, bool]  # "F" (hidden states) or "B" (their gradients); whether to a higher rank


@dataclass
class Arrival:
    """Tensors that are on their way to this rank.

    Attributes:
        tensors: buffers; valid after :meth:`wait`.
    """

    tensors: tuple[Tensor, ...]
    _works: Sequence[dist.Work] = field(default=(), repr=False)
    _sender: int = -1

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until the tensors are here, and return them.

        Raises:
            LostRankError: the sender has ended.
        """
        with _named(self._sender):
            for work in self._works:
                work.wait()
        return self.tensors


@contextmanager
def _named(peer: int) -> Iterator[None]:
    """Name the rank at the other end of a connection that breaks."""
    try:
        yield
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise LostRankError(f"rank {peer} is gone (killed, or its connection broke: {reason})", peer) from error


class StageChannel:
    """Point-to-point messages between this rank and the other pipeline ranks of its column of the mesh.

    With NCCL, the messages of two ranks in one group run in the order in which they were posted, so each direction and
    kind has a group of its own. Gloo tells messages apart by tags.

    Args:
        groups: (kind, whether to a higher rank) -> group over the pipeline ranks.
        rank: pipeline rank of this process.
    """

    def __init__(self, groups: Mapping[Direction, dist.ProcessGroup], rank: int) -> None:
        self._groups, self._rank = groups, rank
        self._sent: dict[tuple[str, int], list[tuple[dist.Work, Tensor, int]]] = {}

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Send tensors to a rank, without waiting.

        Args:
            kind: ``F`` or ``B``.
            tensors: any shapes; they must not change before :meth:`finish`.
            peer: pipeline rank of the receiver.
            tag: number of the message, equal on both sides, and below 2**20.
        """
        group = self._groups[kind, peer > self._rank]
        receiver = dist.get_global_rank(group, peer)
        self._free((kind, peer))
        for index, tensor in enumerate(tensors):
            whole = tensor.detach().contiguous()
            with _named(receiver):
                work = dist.isend(whole, group=group, group_dst=peer, tag=tag << 8 | index)
            assert work is not None
            self._sent.setdefault((kind, peer), []).append((work, whole, receiver))

    def receive(self, kind: str, like: Sequence[Tensor], peer: int, tag: int) -> Arrival:
        """Post the receives of a message, without waiting.

        Args:
            kind: ``F`` or ``B``.
            like: tensors with the shapes, dtypes and device of those that will come; may be on the meta device.
            peer: pipeline rank of the sender.
            tag: see :meth:`send`.
        """
        group = self._groups[kind, peer < self._rank]
        sender = dist.get_global_rank(group, peer)
        works = []
        for index, buffer in enumerate(like):
            with _named(sender):
                work = dist.irecv(buffer, group=group, group_src=peer, tag=tag << 8 | index)
            assert work is not None
            works.append(work)
        return Arrival(tuple(like), works, sender)

    def _free(self, of: tuple[str, int]) -> None:
        """Free the messages of a kind to a peer that have left.

        Gloo never reports a send as complete, so we wait for it. A validated schedule completes even if each send waits
        for its receive at once; this waits later, before the next send of the kind to this peer.
        """
        sent = self._sent.get(of, [])
        if any(tensor.device.type == "cpu" for _, tensor, _ in sent):
            self._wait(sent)
        self._sent[of] = [message for message in sent if not message[0].is_completed()]

    def finish(self) -> None:
        """Wait until everything that was sent has left, and free it."""
        for sent in self._sent.values():
            self._wait(sent)
        self._sent.clear()

    @staticmethod
    def _wait(sent: Sequence[tuple[dist.Work, Tensor, int]]) -> None:
        for work, _, receiver in sent:
            with _named(receiver):
                work.wait()
