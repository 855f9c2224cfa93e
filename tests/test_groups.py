"""Which process groups ranks make, how many sockets they need, and what each group is told."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from omnitrain.groups import new_group, shared_group
from omnitrain.parallel.meshes import device_meshes, mesh_group
from omnitrain.parallel.pipeline.apply import connect_pairs, directions
from omnitrain.parallel.sections.carriers import torch_p2p
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.peers import GlooGroup
from omnitrain.plan.mesh import fit_mesh
from omnitrain.recipe import ParallelPlan
from omnitrain.train.process_groups import join_ranks

CPU = torch.device("cpu")


def sockets() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket") for link in links)


def sockets_of_a_run() -> tuple[int, int]:
    """Sockets of this rank's groups after a run has joined, and after all that makes peers later."""
    joined = sockets()  # the pool has made the default group
    ranks = join_ranks(ParallelPlan(), CPU, lays_out=True)
    first = sockets()
    for peers in (
        GlooGroup(),
        GlooGroup(ranks.state.all_groups("loss")),
        join_ranks(ParallelPlan(), CPU, lays_out=True).peers,
    ):
        assert peers.gather(peers.rank) == list(range(dist.get_world_size()))
    return first - joined, sockets() - first


def test_a_run_has_one_more_group_of_all_ranks_than_the_default_group(ranks: RankPool) -> None:
    """A gloo group has a socket for each other rank and one that listens; mesh axes of one rank share such a group."""
    found = ranks.run(sockets_of_a_run, timeout_s=60, world=4)
    assert found[1:] == [(4 + 1, 0)] * 3  # rank 0 also has a store


def groups_of(plan: dict[str, Any]) -> list[int]:
    """How many process groups this rank has after each of two states of one plan, and peers for each axis."""
    made = dist.distributed_c10d._world.pg_map
    counts = []
    for _ in range(2):
        state = init_state_of(ParallelPlan.model_validate(plan))
        counts.append(len(made))
        for axis in ("loss", "dp", "tp", "all"):
            GlooGroup(state.all_groups(axis))
        counts.append(len(made))
    return counts


def test_states_of_the_same_ranks_share_their_groups(ranks: RankPool) -> None:
    found = ranks.run(groups_of, {"components": {"foundation": {"tp": 2}}}, timeout_s=60, world=4)
    # all ranks; alone, pairs of tp, pairs of dp; peers in pairs of dp (which are those of loss), pairs of tp, all
    assert found == [[4, 7, 7, 7]] * 4


def partitions() -> list[tuple[int, ...]]:
    """Groups of a pair and two single ranks, after groups of two pairs: one pair is shared, on all ranks alike."""
    found = []
    for partition in ([[0, 1], [2, 3]], [[0, 1], [2], [3]], [[0, 1, 2, 3]]):
        groups = [shared_group("test", ranks, "test", backend="gloo") for ranks in partition]
        own = next(group for group in groups if group is not None)
        dist.barrier(own)  # the names are those of the other ranks
        found.append(tuple(dist.get_process_group_ranks(own)))
    return found


def test_ranks_that_share_a_group_and_ranks_that_do_not_make_the_next_one_together(ranks: RankPool) -> None:
    found = ranks.run(partitions, timeout_s=60, world=4)
    assert found[0] == [(0, 1), (0, 1), (0, 1, 2, 3)] and found[3] == [(2, 3), (3,), (0, 1, 2, 3)]


def test_a_new_default_group_shares_nothing_with_the_last_one(_alone: None) -> None:
    first = shared_group("test", [0], "test")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    second = shared_group("test", [0], "test")
    assert second is not first and second is shared_group("test", [0], "again")


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


def limit_of(group: dist.ProcessGroup | None) -> timedelta:
    assert group is not None
    return group._get_backend(CPU).options._timeout


def test_a_group_has_the_time_limit_of_the_default_group_and_peers_have_none(_alone: None) -> None:
    """Torch's own new groups have 10 minutes on NCCL and 30 elsewhere, whatever init_process_group was told."""
    assert limit_of(dist.new_group([0])) == timedelta(minutes=30)
    assert limit_of(new_group([0], "test")) == timedelta(seconds=77)
    assert limit_of(GlooGroup().group) == timedelta(days=7)


def splits_for_new_groups() -> tuple[int, int, torch.device | None]:
    """How often torch would split NCCL's communicator of all ranks for a group of two, ours and a plain one."""
    asked: list[Any] = []
    real, world = dist.distributed_c10d._get_split_source, dist.group.WORLD
    dist.distributed_c10d._get_split_source = lambda *given: asked.append(given)
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) does
    try:
        new_group([0, 1], "two of three", "gloo")
        of_ours, bound = len(asked), world.bound_device_id
        dist.new_group([0, 1], backend="gloo")
    finally:
        dist.distributed_c10d._get_split_source, world.bound_device_id = real, None
    return of_ours, len(asked) - of_ours, bound


def test_a_group_splits_no_communicator_of_gpus_that_are_bound(ranks: RankPool) -> None:
    """Ranks outside of the group would wait in the split for those inside, who never come (pytorch#197568)."""
    assert ranks.run(splits_for_new_groups, timeout_s=60, world=3) == [(0, 1, torch.device("cuda", 0))] * 3


class Options:
    """In place of ProcessGroupNCCL.Options, which torch for a CPU lacks; with its attributes and their defaults."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=-1)


@contextmanager
def asked_for(backends: str = "cpu:gloo,cuda:nccl") -> Iterator[list[tuple[str, str, Any, timedelta]]]:
    """Description, backend, options and time limit of each group, made with gloo in place of ``backends``."""
    asked: list[tuple[str, str, Any, timedelta]] = []
    real = dist.new_group

    def new(ranks: list[int], timeout: timedelta, backend: str, pg_options: Any, group_desc: str) -> Any:
        asked.append((group_desc, backend, pg_options, timeout))
        return real(ranks, backend="gloo", timeout=timeout)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(dist, "new_group", new)
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
        patch.setattr(dist, "get_backend_config", lambda: backends)
        yield asked


def options_of_meshes() -> dict[str, tuple[bool, bool]]:
    """Mesh axis -> whether its group has high priority, and whether both of its time limits are the same."""
    with asked_for() as asked:
        device_meshes(fit_mesh(4, ep=2, tp=1), "cpu")
    return {
        name: (options is not None and options.is_high_priority_stream, options is None or options._timeout == limit)
        for name, _, options, limit in asked
    }


def test_groups_of_experts_have_streams_of_high_priority_and_no_others_have(ranks: RankPool) -> None:
    found = ranks.run(options_of_meshes, timeout_s=60, world=4)[0]
    assert found.pop("ep") == (True, True)
    assert len(found) >= 2 and set(found.values()) == {(False, True)}


def test_a_group_that_meshes_share_takes_cpu_tensors_beside_a_default_group_of_nccl_alone(
    _alone: None,
) -> None:
    with asked_for("cuda:nccl") as asked:
        assert mesh_group([0], "pp") is mesh_group([0], "dp")
    assert [(name, backend) for name, backend, *_ in asked] == [("pp", "cpu:gloo,cuda:nccl")]


def test_groups_of_sections_occupy_four_multiprocessors_and_pairs_of_stages_as_many_as_nccl_wants(
    _alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_p2p, "connect", lambda *_: None)
    with asked_for() as asked:
        torch_p2p.torch_carrier([0], [], torch.device("cuda"))
        new_group([0], "pp", "nccl")
    (edge, *of_edge), (pair, *of_pair) = asked
    assert (edge, of_edge[0], of_edge[1].config.max_ctas) == ("section_edge", "nccl", 4)
    assert (pair, of_pair[0], of_pair[1]) == ("pp", "nccl", None)
    assert of_edge[1]._timeout == of_edge[2] == of_pair[2] == timedelta(seconds=77)


def first_messages(senders: list[int], receivers: list[int]) -> list[tuple[str, int]]:
    """What this rank posts when an edge is connected, and when the stages of a pipeline are."""
    posted: list[tuple[str, int]] = []
    real = dist.batch_isend_irecv

    def recorded(operations: list[dist.P2POp]) -> Any:
        posted.extend((one.op.__name__, one.peer) for one in operations)
        return real(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", recorded)
        torch_p2p.connect(dist.group.WORLD, senders, receivers, CPU)
        connect_pairs(np.array([[*senders, *receivers]]), directions([0, 1]), CPU)
    return posted


def test_every_two_ranks_that_will_exchange_messages_have_exchanged_one_when_their_group_is_made(
    ranks: RankPool,
) -> None:
    """NCCL connects two ranks, in each direction, at their first message; a collective does not."""
    found = ranks.run(first_messages, [0, 2], [1, 3], timeout_s=60, world=4)
    assert [of_rank[:2] for of_rank in found] == [
        [("isend", 1), ("isend", 3)],
        [("irecv", 0), ("irecv", 2)],
        [("isend", 1), ("isend", 3)],
        [("irecv", 0), ("irecv", 2)],
    ]
    assert [of_rank[2:] for of_rank in found] == [
        [("isend", 2), ("irecv", 2)],  # forward of stage 0 to 1, backward of 1 to 0
        [],
        [("irecv", 0), ("isend", 0)],
        [],
    ]
