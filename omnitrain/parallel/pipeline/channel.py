"""Send tensors between the stages of a pipeline. Both sides know all shapes, so nothing else is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.groups import new_group
from omnitrain.parallel.sections.carriers.torch_p2p import Transfer, connect, receive_tensors, send_tensors

Direction = tuple[str, int, int]  # "F" (hidden states) or "B" (their gradients); pipeline ranks that send and receive


class StageChannel:
    """Messages between this rank and others of its column; ``groups`` are by direction, ``ranks`` by pipeline rank."""

    def __init__(self, groups: Mapping[Direction, dist.ProcessGroup], ranks: Sequence[int], rank: int) -> None:
        self._groups, self._ranks, self._rank = groups, ranks, rank
        self._sent: dict[tuple[str, int], list[Transfer]] = {}

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Begin to send tensors of any shapes, not to be changed before :meth:`finish`; ``tag`` is below 2**20."""
        self._free((kind, peer))
        sent = send_tensors(tensors, *self._end(kind, self._rank, peer, peer), tag)
        self._sent.setdefault((kind, peer), []).append(sent)

    def receive(self, kind: str, like: Sequence[Tensor], peer: int, tag: int) -> Transfer:
        """Post the receives of a message from ``peer`` into ``like``, buffers with its shapes, dtypes and device."""
        return receive_tensors(like, *self._end(kind, peer, self._rank, peer), tag)

    def _end(self, kind: str, sender: int, receiver: int, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group of a direction, and the rank of ``peer`` in it."""
        group = self._groups[kind, sender, receiver]
        return group, dist.get_group_rank(group, self._ranks[peer])

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


def directions(stage_ranks: Sequence[int]) -> list[Direction]:
    """Return the messages between stages, given the pipeline rank of each stage; in one order on all ranks."""
    pairs = sorted({pair for pair in pairwise(stage_ranks) if pair[0] != pair[1]})
    return [("F", *pair) for pair in pairs] + [("B", later, earlier) for earlier, later in pairs]


def connect_pairs(
    columns: np.ndarray, of: Sequence[Direction], device: torch.device
) -> dict[Direction, dist.ProcessGroup]:
    """Make a group for each direction between two ranks of each column, and connect its ranks. All ranks must call it.

    NCCL runs the messages of a group in the order in which they were posted, and connects two ranks at their first one:
    the rank that posts it waits on the host until the other rank comes. If two ranks begin with different directions,
    as 1F1B's do, both would wait for ever (``connected`` of :func:`~omnitrain.plan.schedule.simulate.simulate`).
    ``columns`` are ``[n, pipeline ranks]``; directions have one order on all ranks. Returns the groups that have this
    rank.
    """
    made = {}
    backend = "nccl" if device.type == "cuda" else "gloo"  # that of the run would also have sockets of the host
    for kind, sender, receiver in of:
        for ends in columns[:, [sender, receiver]].tolist():
            group = new_group(ends, "pp", backend)
            if group is not None:
                made[kind, sender, receiver] = group, ends
    for group, (source, target) in made.values():
        connect(group, [source], [target], device)
    return {direction: group for direction, (group, _) in made.items()}
