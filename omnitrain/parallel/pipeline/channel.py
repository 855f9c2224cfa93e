"""Send tensors between the stages of a pipeline. Both sides know all shapes, so nothing else is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from omnitrain.parallel.sections.carriers.torch_p2p import Transfer, receive_tensors, send_tensors

Direction = tuple[str, bool]  # "F" (hidden states) or "B" (their gradients); whether to a higher rank


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
        self._sent: dict[tuple[str, int], list[Transfer]] = {}

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Send tensors to a rank, without waiting.

        Args:
            kind: ``F`` or ``B``.
            tensors: any shapes; they must not change before :meth:`finish`.
            peer: pipeline rank of the receiver.
            tag: number of the message, equal on both sides, and below 2**20.
        """
        self._free((kind, peer))
        sent = send_tensors(tensors, self._groups[kind, peer > self._rank], peer, tag)
        self._sent.setdefault((kind, peer), []).append(sent)

    def receive(self, kind: str, like: Sequence[Tensor], peer: int, tag: int) -> Transfer:
        """Post the receives of a message, without waiting.

        Args:
            kind: ``F`` or ``B``.
            like: buffers with the shapes, dtypes and device of the tensors that will come.
            peer: pipeline rank of the sender.
            tag: see :meth:`send`.
        """
        return receive_tensors(like, self._groups[kind, peer < self._rank], peer, tag)

    def _free(self, of: tuple[str, int]) -> None:
        """Free the messages of a kind to a peer that have left.

        Gloo never reports a send as complete, so we wait for it. A validated schedule completes even if each send waits
        for its receive at once; this waits later, before the next send of the kind to this peer.
        """
        sent = self._sent.get(of, [])
        for transfer in sent:
            if any(tensor.device.type == "cpu" for tensor in transfer.tensors):
                transfer.wait()
        self._sent[of] = [transfer for transfer in sent if not transfer.has_ended]

    def finish(self) -> None:
        """Wait until everything that was sent has left, and free it."""
        for sent in self._sent.values():
            for transfer in sent:
                transfer.wait()
        self._sent.clear()
