import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import forget_parallel_state, leave_process_groups
from omnitrain.plan.mesh import MeshShape

MESHES = ("dp", "fsdp", "ep_fsdp", "ep", "tp", "pp")
GROUPS = ("dp", "sp", "cp", "tp", "ep", "pp", "sequence", "loss", "data", "stage")
AXES = ("dp", "dp_replicate", "dp_shard", "fsdp", "ep", "tp", "sp", "cp", "sequence", "pp")
SWITCHED = ("dp", "fsdp", "ep", "tp", "sp", "cp", "sequence", "pp")


def members(group: dist.ProcessGroup) -> list[int]:
    """By communication: the digits of the sum."""
    total = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    return [rank for rank, digit in enumerate(reversed(str(total.item()))) if digit == "1"]


def members_of_all_groups(state: ot.parallel.ParallelState) -> dict[str, list[int]]:
    meshes = {name: getattr(state, f"{name}_mesh") for name in MESHES}
    found = {name: members(mesh.get_group(mesh.ndim - 1)) for name, mesh in meshes.items()}
    found |= {f"{name}_group": members(getattr(state, f"{name}_group")) for name in GROUPS}
    found |= {f"{name}_copies": members(mesh.get_group(0)) for name, mesh in meshes.items() if mesh.ndim == 2}
    return found


def answers(degrees: dict[str, Any]) -> tuple[MeshShape, dict[str, list[int]], dict[str, tuple[int, int]]]:
    """The shape, the members of each group, and size and rank on each axis."""
    state = ot.init_parallel_state(**degrees)
    assert ot.get_parallel_state() is state
    sizes_and_ranks = {name: (getattr(state, f"{name}_size"), getattr(state, f"{name}_rank")) for name in AXES}
    assert [getattr(state, f"{name}_enabled") for name in SWITCHED] == [sizes_and_ranks[n][0] > 1 for n in SWITCHED]
    assert (state.ulysses_size, state.ulysses_rank) == sizes_and_ranks["sp"]
    assert state.ulysses_group is state.sp_group and state.ulysses_enabled == state.sp_enabled
    return state.shape, members_of_all_groups(state), sizes_and_ranks


@pytest.mark.parametrize(
    ("world", "degrees", "shape"),
    [
        (1, {}, MeshShape()),
        (2, {"ulysses_size": 2}, MeshShape(sp=2)),
        (4, {"ep_size": 2}, MeshShape(dp_shard=4, ep=2)),
        (4, {"dp_replicate_size": 2}, MeshShape(dp_replicate=2, dp_shard=2)),
        (4, {"dp_mode": "replicate"}, MeshShape(dp_replicate=4)),
        (4, {"dp_mode": "replicate", "tp_size": 2}, MeshShape(dp_replicate=2, tp=2)),
        (4, {"dp_mode": "hsdp", "dp_shard_size": 2}, MeshShape(dp_replicate=2, dp_shard=2)),
        (4, {"tp_size": 2, "ulysses_size": 2}, MeshShape(sp=2, tp=2)),
        (4, {"pp_size": 2, "cp_size": 2, "ep_size": 2}, MeshShape(pp=2, cp=2, ep=2)),
    ],
    ids=str,
)
def test_groups_meshes_and_ranks_are_those_of_the_shape(
    ranks: RankPool, world: int, degrees: dict[str, Any], shape: MeshShape
) -> None:
    for rank, (found_shape, groups, sizes_and_ranks) in enumerate(
        ranks.run(answers, degrees, timeout_s=30, world=world)
    ):
        assert found_shape == shape
        expected = {name: shape.group(rank, name).tolist() for name in MESHES}
        expected |= {f"{name}_group": shape.group(rank, name).tolist() for name in GROUPS}
        if shape.dp_replicate > 1:
            copies = shape.group(rank, "dp_replicate").tolist()
            expected |= {"fsdp_copies": copies, "ep_fsdp_copies": copies}
        assert groups == expected
        assert sizes_and_ranks == {name: (shape.size(name), shape.rank_in(rank, name)) for name in AXES}


def several_states() -> list[dict[str, list[int]]]:
    made = [ot.init_parallel_state(ulysses_size=2), ot.init_parallel_state(tp_size=4), ot.init_parallel_state()]
    assert ot.get_parallel_state() is made[-1]
    return [members_of_all_groups(state) for state in made]


def test_several_states_live_over_the_same_ranks(ranks: RankPool) -> None:
    shapes = [MeshShape(dp_shard=2, sp=2), MeshShape(tp=4), MeshShape(dp_shard=4)]
    for rank, found in enumerate(ranks.run(several_states, timeout_s=30)):
        for groups, shape in zip(found, shapes, strict=True):
            assert {name: groups[name] for name in MESHES} == {
                name: shape.group(rank, name).tolist() for name in MESHES
            }


def number_of_groups(degrees: dict[str, Any]) -> int:
    ot.init_parallel_state(**degrees)
    return len(dist.distributed_c10d._world.pg_names)


@pytest.mark.parametrize(
    ("degrees", "number"), [({}, 2), ({"ulysses_size": 2}, 4), ({"dp_replicate_size": 2}, 4), ({"ep_size": 4}, 3)]
)
def test_axes_with_the_same_groups_share_them(ranks: RankPool, degrees: dict[str, Any], number: int) -> None:
    """All ranks, single ranks, and pairs of neighbours and of others; those of experts stay by themselves."""
    assert ranks.run(number_of_groups, degrees, timeout_s=30) == [number] * 4


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    forget_parallel_state()
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_needs_no_launcher() -> None:
    state = ot.init_parallel_state()
    assert (state.world_size, state.rank, state.dp_size, state.dp_rank, state.device_type) == (1, 0, 1, 0, "cpu")
    assert set(map(tuple, members_of_all_groups(state).values())) == {(0,)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.rank = 1
    with pytest.raises(
        UserError, match=r"these degrees do not fit 1 rank:\ntp_size=2 needs a multiple of 2 ranks, found 1"
    ):
        ot.init_parallel_state(tp_size=2)
    assert ot.get_parallel_state() is state


def test_groups_take_cpu_tensors_where_the_users_own_does_not() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        counts = torch.tensor([3.0])
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(counts)
        dist.all_reduce(counts, group=ot.init_parallel_state().loss_group)
        assert counts.tolist() == [3.0]
    finally:
        forget_parallel_state()
        dist.destroy_process_group()


def gloo_threads() -> int:
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def gloo_threads_after_leaving() -> int:
    placement = [Shard(0)]
    tensor = distribute_tensor(torch.ones(4), ot.init_parallel_state(tp_size=2).tp_mesh, placement).requires_grad_()
    total = tensor.square().sum().full_tensor()
    total.backward()  # on a GPU in a thread of autograd, which has caches of its own
    assert total == 4 and gloo_threads() > 0
    del tensor, total
    leave_process_groups()
    return gloo_threads()


def test_no_thread_of_a_process_group_is_left_to_abort_the_end_of_a_process(ranks: RankPool) -> None:
    """Such a thread, if it lets go of a tensor while the interpreter ends, aborts the process."""
    assert ranks.run(gloo_threads_after_leaving, world=2, timeout_s=30) == [0, 0]


def test_the_default_is_asked_for_too_early() -> None:
    with pytest.raises(UserError, match=r"call omnitrain\.init_parallel_state\(\) first"):
        ot.get_parallel_state()


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"ep_size": 3},
            r"4 ranks:\nep_size=3 must divide dp_shard_size x cp_size x ulysses_size = 4; 1, 2, 4 would",
        ),
        ({"dp_mode": "fsdp1"}, "dp_mode is 'fsdp1'; expected one of fsdp2, hsdp, replicate"),
        ({"dp_mode": "replicate", "dp_shard_size": 2}, "dp_shard_size is 2, expected 1"),
        ({"dp_mode": "hsdp"}, "set dp_replicate_size above 1, or dp_shard_size"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_on_every_rank(
    ranks: RankPool, degrees: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(answers, degrees, timeout_s=30)
    assert sorted(caught.value.ranks) == [0, 1, 2, 3]
    with pytest.raises(UserError, match=message):
        raise caught.value.__cause__
