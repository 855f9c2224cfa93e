"""All ranks of the default process group as :class:`~omnitrain.models.peers.Peers`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from omnitrain.models.peers import Key, T

# One of them may score or write for as long as it likes. A dead one is noticed at once, a stalled run by the watch.
_PATIENCE = timedelta(days=7)


class GlooPeers:
    """All ranks, which talk over a gloo group of their own: no answer waits for the device, and no wait ends early.

    Every rank must make one, in the same order as other process groups.

    Attributes:
        rank: this one.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="peers")

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flags.item())

    def sum(self, value: float) -> float:
        """The sum of the values of all ranks, in fp64."""
        total = torch.tensor(value, dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=self._group)
        return total.item()

    def most(self, counts: Mapping[Key, int]) -> dict[Key, int]:
        """The largest count of every key over all ranks; a key may be missing on some."""
        largest: dict[Key, int] = {}
        for theirs in self.gather(dict(counts)):
            for key, count in theirs.items():
                largest[key] = max(count, largest.get(key, count))
        return largest

    def gather(self, value: T) -> list[T]:
        """The value of every rank (pickled), in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values
