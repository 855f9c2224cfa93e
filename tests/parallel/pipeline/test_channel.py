"""Ranks that exchange messages of stages are connected before the first step, in one order for all."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from omnitrain.parallel.pipeline.apply import StageChannel, connect_pairs, directions
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.plan.schedule.generators import generate
from omnitrain.plan.schedule.lower import lower
from tests.plan.schedule.as_text import channels

CPU = torch.device("cpu")


def test_the_directions_are_the_channels_of_every_schedule_on_the_stages() -> None:
    for kind, p in (("1f1b", 4), ("gpipe", 3), ("interleaved", 2), ("interleaved", 4), ("zbv", 3)):
        schedule = lower(generate(kind, p, 2 * p))
        found = directions(schedule.stage_ranks)
        expected = {(kind, sender, receiver) for kind, _, sender, receiver in channels(schedule)}
        assert set(found) == expected
        assert len(found) == len(expected)


def crossed_messages(columns: list[list[int]]) -> tuple[list[tuple[str, int, int]], list[float]]:
    """Each rank of a pair first receives, then sends, as 1F1B's do; the first messages are connections."""
    of = directions(range(len(columns[0])))
    groups = connect_pairs(np.array(columns), of, CPU)
    (ranks,) = [column for column in columns if dist.get_rank() in column]
    rank = ranks.index(dist.get_rank())
    channel = StageChannel(groups, ranks, rank)
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < len(ranks)]
    incoming = [channel.receive("F" if p < rank else "B", [torch.empty(2)], p, 0) for p in peers]
    for peer in peers:
        channel.send("F" if peer > rank else "B", [torch.full((2,), float(dist.get_rank()))], peer, 0)
    received = [transfer.wait()[0][0].item() for transfer in incoming]
    channel.finish()
    return sorted(groups), received


def test_each_direction_of_a_pair_has_a_group_that_is_connected_when_it_is_made(ranks: RankPool) -> None:
    results = ranks.run(crossed_messages, [[0, 2], [1, 3]], timeout_s=60, world=4)
    assert [found for found, _ in results] == [[("B", 1, 0), ("F", 0, 1)]] * 4
    assert [received for _, received in results] == [[2.0], [3.0], [0.0], [1.0]]
    results = ranks.run(crossed_messages, [[0, 1, 2]], timeout_s=60, world=3)
    assert [received for _, received in results] == [[1.0], [0.0, 2.0], [1.0]]
