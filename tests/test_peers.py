"""What ranks tell each other on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from omnitrain.errors import TrainingError, UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.peers import SINGLE_PROCESS, GlooGroup, Peers, all_or_raise, ranks_of


def told(peers: Peers) -> tuple[Any, ...]:
    rank = peers.rank
    return (
        peers.any(rank == peers.size - 1),
        peers.any_of_each([rank == 0, False]),
        peers.sum(rank + 0.5),
        peers.max(0.5 - rank),
        peers.gather({"rank": rank}),
        peers.gather_on_first("x" * rank),
        peers.of_first([rank]),
    )


def told_on_ranks() -> tuple[Any, ...]:
    return told(GlooGroup())


def test_ranks_tell_each_other_what_they_have(ranks: RankPool) -> None:
    found = ranks.run(told_on_ranks, timeout_s=60, world=3)
    everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert found[0] == (True, [True, False], 4.5, 0.5, everyone, ["", "x", "xx"], [0])
    assert found[1:] == [(True, [True, False], 4.5, 0.5, everyone, [], [0])] * 2
    assert told(SINGLE_PROCESS) == (True, [True, False], 0.5, 0.5, [{"rank": 0}], [""], [0])


def test_a_rank_that_is_in_no_group_is_told_so(ranks: RankPool) -> None:
    told = ranks.run(outside_or_in, timeout_s=60, world=3)
    assert told == [[0, 1], [0, 1], "rank 2 is in none of the groups [[0, 1]], so it has no peers"]


def outside_or_in() -> list[int] | str:
    try:
        return GlooGroup([[0, 1]]).gather(dist.get_rank())
    except ValueError as error:
        return str(error)


def raised_for(errors: dict[int, Exception]) -> str:
    """What this rank raises if some ranks fail so; or its result."""
    rank = dist.get_rank()

    def make() -> str:
        if rank in errors:
            raise errors[rank]
        return f"made on {rank}"

    try:
        return all_or_raise(GlooGroup(), make)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ({}, ["made on 0", "made on 1"]),
        ({0: UserError("no")}, ["UserError: no", "UserError: no"]),
        ({1: TrainingError("full")}, ["TrainingError: rank 1 failed: full", "TrainingError: full"]),
        ({1: KeyError("x")}, ["TrainingError: rank 1 failed: KeyError: 'x'", "KeyError: 'x'"]),
        ({0: UserError("a"), 1: UserError("b")}, ["UserError: a", "UserError: b"]),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(
    ranks: RankPool, errors: dict[int, Exception], raised: list[str]
) -> None:
    assert ranks.run(raised_for, errors, timeout_s=60, world=2) == raised


def groups_of_models() -> list[str]:
    """The names of the process groups in three uses of the ranks of a model."""
    mesh, names = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for _ in range(3):
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with ranks_of(model) as peers:
            assert peers.gather(dist.get_rank()) == [0, 1] and peers.group is not None
            names.append(peers.group.group_name)
    return names


def test_all_models_share_one_group_of_all_ranks(ranks: RankPool) -> None:
    names = ranks.run(groups_of_models, timeout_s=60, world=2)
    assert [len(set(of_rank)) for of_rank in names] == [1, 1]
    with ranks_of(nn.Linear(2, 2)) as peers:
        assert peers is SINGLE_PROCESS
