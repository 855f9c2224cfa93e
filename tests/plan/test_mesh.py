import itertools
import time

import numpy as np
import pytest

from omnitrain.errors import UserError
from omnitrain.plan.mesh import DENSE_AXES, EXPERT_AXES, MeshShape, fit_mesh

SHAPES = [
    fit_mesh(1),
    fit_mesh(4, sp=2),
    fit_mesh(24, dp_replicate=2, sp=3, tp=2, ep=3),
    fit_mesh(64, pp=2, dp_replicate=2, cp=2, sp=2, tp=2, ep=8),
]


@pytest.mark.parametrize(
    ("world_size", "degrees", "expected"),
    [
        (1, {}, MeshShape()),
        (8, {}, MeshShape(dp_shard=8)),
        (8, {"dp_replicate": None}, MeshShape(dp_shard=8)),
        (8, {"dp_replicate": 2}, MeshShape(dp_replicate=2, dp_shard=4)),
        (8, {"dp_replicate": None, "dp_shard": 2}, MeshShape(dp_replicate=4, dp_shard=2)),
        (8, {"dp": 4, "tp": 2, "ep": 4}, MeshShape(dp_shard=4, tp=2, ep=4)),
        (16, {"pp": 2, "sp": 2, "cp": 2, "ep": 8}, MeshShape(pp=2, dp_shard=2, cp=2, sp=2, ep=8)),
    ],
)
def test_degrees_left_out_are_inferred(world_size: int, degrees: dict[str, int | None], expected: MeshShape) -> None:
    assert fit_mesh(world_size, **degrees) == expected
    assert expected.world_size == world_size


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, "tp=3 needs a multiple of 3 ranks, found 8\ntp=3: 1, 2, 4, 8 would fit"),
        ({"tp": 3, "sp": 2}, "ulysses=2 x tp=3 needs a multiple of 6 ranks, .* 8\ntp=3: 1, 2, 4 would fit"),
        ({"tp": 4, "sp": 4}, "ulysses=4: 1, 2 would fit\ntp=4: 1, 2 would fit"),
        ({"dp": 8, "tp": 2}, "dp=8 must be 4, the number of ranks that the other degrees leave"),
        ({"dp_replicate": 3}, "dp_replicate=3 must divide dp; 1, 2, 4, 8 would fit"),
        ({"dp_shard": 3, "tp": 2}, "dp_shard=3 must divide dp; 1, 2, 4 would fit"),
        ({"dp_shard": 2, "dp_replicate": 2}, "2 x 2 must be 8: one of 8 x 1, 4 x 2, 2 x 4, 1 x 8"),
        ({"ep": 3}, "ep=3 must divide dp_shard x cp x ulysses = 8; 1, 2, 4, 8 would fit"),
        ({"ep": 8, "tp": 2}, "ep=8 must divide dp_shard x cp x ulysses = 4; 1, 2, 4 would fit"),
        ({"tp": "2", "ep": None}, "tp='2' is not a whole number of at least 1\nep=None is not a"),
        ({"sp": 0, "dp": -1, "tp": 2.0}, "dp=-1 is not a .* 1\nulysses=0 is not a .* 1\ntp=2.0 is not a whole number"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_those_that_would(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)these degrees do not fit 8 ranks:\n.*{message}"):
        fit_mesh(8, **degrees)


def coordinates(shape: MeshShape, rank: int) -> dict[str, int]:
    """Place of ``rank`` on every axis of both views: the last axis counts fastest."""
    found = {}
    for view in (DENSE_AXES, EXPERT_AXES):
        rest = rank
        for axis in reversed(view):
            rest, found[axis] = divmod(rest, getattr(shape, axis))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_are_the_ranks_that_differ_on_their_axes_alone(shape: MeshShape) -> None:
    places = [coordinates(shape, rank) for rank in range(shape.world_size)]
    for view in (DENSE_AXES, EXPERT_AXES):
        for axes in itertools.chain.from_iterable(itertools.combinations(view, n) for n in range(len(view) + 1)):
            others = [axis for axis in view if axis not in axes]
            expected: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(places):
                expected.setdefault(tuple(place[axis] for axis in others), []).append(rank)
            assert shape.groups(*axes).tolist() == list(expected.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_place_is_where_the_rank_is_on_an_axis(shape: MeshShape) -> None:
    for rank in range(shape.world_size):
        expected = coordinates(shape, rank)
        for axis, place in expected.items():
            assert shape.rank_in(rank, axis) == place
            assert shape.group(rank, axis)[place] == rank
        assert shape.rank_in(rank, "dp") == expected["dp_replicate"] * shape.dp_shard + expected["dp_shard"]
    assert [shape.rank_in(rank, "fsdp") for rank in range(shape.world_size)] == shape.ranks_in("fsdp").tolist()


def test_products_are_their_axes() -> None:
    shape = fit_mesh(24, dp_replicate=2, sp=3, tp=2)
    assert shape.groups("dp").tolist() == shape.groups("dp_replicate", "dp_shard").tolist()
    assert shape.groups("fsdp").tolist()[:2] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert shape.groups("sp").tolist()[0] == [0, 2, 4]
    assert (shape.size("dp"), shape.size("fsdp"), shape.size()) == (4, 6, 1)


def test_experts_are_shared_by_neighbours_and_sharded_over_the_rest() -> None:
    shape = fit_mesh(16, dp_replicate=2, sp=2, ep=4)
    assert (shape.ep_fsdp, shape.size("ep", "ep_fsdp")) == (2, shape.size("fsdp"))
    assert shape.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert shape.groups("ep_fsdp").tolist()[:2] == [[0, 4], [1, 5]]
    assert shape.groups("ep", "ep_fsdp").tolist() == shape.groups("fsdp").tolist()


def test_axes_of_two_views_have_no_common_groups() -> None:
    for axes in [("ep", "sp"), ("sp", "sp"), ("dp", "dp_shard"), ("width",)]:
        with pytest.raises(ValueError, match="no mesh has the axes"):
            fit_mesh(8, sp=2).groups(*axes)


def test_sixteen_thousand_ranks_take_milliseconds() -> None:
    began = time.perf_counter()
    shape = fit_mesh(16384, pp=4, dp_replicate=8, cp=2, sp=4, tp=4, ep=32)
    names = ["dp", "fsdp", *DENSE_AXES, *EXPERT_AXES]
    for name in names:
        groups = shape.groups(name)
        assert (np.sort(groups, axis=None) == np.arange(16384)).all()
        shape.ranks_in(name)
        for rank in range(0, 16384, 128):
            assert rank in shape.group(rank, name)
    assert time.perf_counter() - began < 1.0
