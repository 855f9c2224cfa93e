"""Data processes of all ranks: none goes on alone."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from omnitrain.errors import TrainingError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step import rendezvous as rendezvous_module
from omnitrain.parallel.step.rendezvous import DataProcessGroup, open_rendezvous


def meet_three_times() -> tuple[int, float]:
    """Rank 1 has no data for the third step; how many steps a rank had, and when it learnt that there are no more."""
    rendezvous = open_rendezvous()
    peers, steps = DataProcessGroup(rendezvous), 2 if dist.get_rank() == 1 else 3
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


def meet_without_rank_1() -> str:
    """What rank 0 is told while the data process of rank 1 never comes."""
    peers, message = DataProcessGroup(open_rendezvous()), ""
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous_module, "_TO_COME", timedelta(seconds=1))
            with pytest.raises(TrainingError) as caught:
                peers.join()
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_data_process_that_never_comes_is_not_waited_for(ranks: RankPool) -> None:
    message, _ = ranks.run(meet_without_rank_1, timeout_s=60, world=2)
    assert message.startswith("the data processes of 2 ranks did not connect within 1 s")


def long_tables() -> list[list[int]]:
    """The sums of all tables; that of rank 1 is longer than ranks send at first, then shorter again."""
    rank, peers = dist.get_rank(), DataProcessGroup(open_rendezvous())
    return [peers.tables(np.full(size, size)).sum(axis=1).tolist() for size in (3 + 300 * rank, 2 + rank)]


def test_a_long_table_arrives_whole_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(long_tables, timeout_s=60, world=2) == [[[9, 303**2], [4, 9]]] * 2


def meet_late() -> int:
    """Rank 1 comes in time, and then takes longer for its table than it had to come."""
    peers = DataProcessGroup(open_rendezvous())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous_module, "_TO_COME", timedelta(seconds=2))
        peers.join()
    time.sleep(2.5 * dist.get_rank())
    return len(peers.tables(np.array([1])))


def test_a_rank_may_take_longer_for_a_step_than_for_coming(ranks: RankPool) -> None:
    assert ranks.run(meet_late, timeout_s=60, world=2) == [2, 2]
