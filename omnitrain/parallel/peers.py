"""Ranks of a process group as :class:`~omnitrain.models.peers.Peers`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from omnitrain.models.peers import Key, T

# One of them may score or write for as long as it likes. A dead one is noticed at once, a stalled run by the watch.
_PATIENCE = timedelta(days=7)


class GlooPeers:
    """Ranks which talk over a gloo group of their own: no answer waits for the device, and no wait ends early.

    Every rank must make one, in the same order as other process groups.

    Args:
        groups: ``[groups, size of each]`` global ranks: each rank talks to those of its own group; None: all to all.

    Attributes:
        rank: this one, among those of its group.
        size: how many there are.
    """

    def __init__(self, groups: np.ndarray | None = None) -> None:
        everyone = np.arange(dist.get_world_size())[None] if groups is None else groups
        for ranks in everyone.tolist():
            group = dist.new_group(ranks, backend="gloo", timeout=_PATIENCE, group_desc="peers")
            if dist.get_rank() in ranks:
                self._group, self.rank, self.size = group, ranks.index(dist.get_rank()), len(ranks)

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
