"""Data processes of all ranks: none goes on alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch.distributed as dist

from omnitrain.parallel.meeting import DataPeers, open_meeting
from omnitrain.parallel.ranks import RankPool


def meet_three_times() -> tuple[int, float]:
    """Rank 1 has no data for the third step; how many steps a rank had, and when it learnt that there are no more."""
    meeting = open_meeting()
    peers, steps = DataPeers(meeting), 2 if dist.get_rank() == 1 else 3
    for number in range(steps):
        if number == 2:
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                peers.tables(np.array([1]))
            dist.barrier()
            return number, time.monotonic() - start
        assert len(peers.tables(np.array([1]))) == dist.get_world_size()
    del peers
    dist.barrier()
    return steps, 0.0


def test_a_rank_whose_data_end_early_ends_the_steps_of_all_at_once(ranks: RankPool) -> None:
    found = ranks.run(meet_three_times, timeout_s=60, world=3)
    assert [steps for steps, _ in found] == [2, 2, 2]
    assert max(seconds for _, seconds in found) < 10
