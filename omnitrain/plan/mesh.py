"""Factorise the ranks of a run into named axes. Pure arithmetic, without a process group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnitrain.errors import UserError

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "ep_fsdp", "ep", "tp")
_INFERRED = ("dp", "dp_replicate", "dp_shard")
_RECIPE_KEYS = {"sp": "ulysses"}  # the axis is called sequence parallelism; the recipe key names the method
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "sequence": ("cp", "sp"),
    "fsdp": ("dp_shard", "cp", "sp"),
    "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
    "data": ("cp", "sp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "sp", "tp"),
    "pp_loss": ("pp", "dp_replicate", "dp_shard", "cp", "sp"),
    "all": DENSE_AXES,
}


@dataclass(frozen=True)
class MeshShape:
    """One factorisation of ``world_size`` ranks.

    Ranks are numbered along the axes in this order; the last axis varies fastest:

        pp x dp_replicate x dp_shard x cp x sp x tp       all parameters except the experts
        pp x dp_replicate x ep_fsdp  x  ep     x tp       the experts

    so that ep x ep_fsdp = dp_shard x cp x sp, and adjacent ranks are adjacent in ``tp``, then ``sp`` (or ``ep``).
    Eight products have names: ``dp`` = dp_replicate x dp_shard, ranks that draw different samples; ``sequence`` =
    cp x sp, ranks that share every packed sequence; ``fsdp`` = dp_shard x sequence, ranks over which parameters are
    sharded; ``loss`` = dp_replicate x fsdp, ranks over which losses add up; ``data`` = sequence x tp, ranks that hold
    the same samples; ``stage`` = loss x tp, all ranks of a pipeline stage; ``pp_loss`` = pp x loss;
    ``all`` = pp x stage.

    :func:`fit_mesh` makes one and checks it.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.size(*DENSE_AXES)

    @property
    def ep_fsdp(self) -> int:
        """Number of ranks over which an expert's parameters are sharded."""
        return self.dp_shard * self.cp * self.sp // self.ep

    def size(self, *axes: str) -> int:
        """Return the number of ranks along the product of ``axes``."""
        return math.prod(int(getattr(self, axis)) for axis in _expanded(axes))

    def groups(self, *axes: str) -> np.ndarray:
        """Return ``[groups, size of each]`` int64: all ranks that differ only in their coordinates on ``axes``.

        They ascend within and between groups. ``axes``: of one of the two views, and products; without any, each rank
        is a group.
        """
        grid, inside = self._grid(axes)
        outside = [index for index in range(grid.ndim) if index not in inside]
        return grid.transpose(outside + inside).reshape(-1, self.size(*axes))

    def group(self, rank: int, *axes: str) -> np.ndarray:
        """Return ``[size]`` int64: the ranks of the group that contains ``rank``, ascending."""
        grid, inside = self._grid(axes)
        coordinates = np.unravel_index(rank, grid.shape)
        return grid[tuple(slice(None) if index in inside else at for index, at in enumerate(coordinates))].reshape(-1)

    def ranks_in(self, *axes: str) -> np.ndarray:
        """Return ``[world_size]`` int64: each global rank's rank in its group on the product of ``axes``."""
        groups = self.groups(*axes)
        ranks = np.empty(self.world_size, dtype=np.int64)
        ranks[groups] = np.arange(groups.shape[1])
        return ranks

    def rank_in(self, rank: int, *axes: str) -> int:
        """Return the rank of global ``rank`` in its group on the product of ``axes``, for example its ``dp`` rank."""
        return int(np.searchsorted(self.group(rank, *axes), rank))

    def __str__(self) -> str:
        degrees = {axis: getattr(self, axis) for axis in (*DENSE_AXES, "ep")}
        return " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one rank"

    def _grid(self, axes: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """Return all ranks with one dim per axis of the view that contains ``axes``, and the dims of ``axes``."""
        expanded = _expanded(axes)
        view = _view(expanded)
        grid = np.arange(self.world_size).reshape(tuple(int(getattr(self, axis)) for axis in view))
        return grid, [index for index, axis in enumerate(view) if axis in expanded]


def _expanded(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(factor for axis in axes for factor in PRODUCTS.get(axis, (axis,)))


def _view(axes: tuple[str, ...]) -> tuple[str, ...]:
    for view in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(view) and len(set(axes)) == len(axes):
            return view
    raise ValueError(f"no mesh has the axes {axes}; expected axes of {DENSE_AXES} or of {EXPERT_AXES}, each once")


def fit_mesh(
    world_size: int,
    *,
    pp: int = 1,
    dp: int | None = None,
    dp_replicate: int | None = 1,
    dp_shard: int | None = None,
    cp: int = 1,
    sp: int = 1,
    tp: int = 1,
    ep: int = 1,
    keys: Mapping[str, str] = _RECIPE_KEYS,
) -> MeshShape:
    """Factorise ``world_size`` ranks with these degrees. Degrees that are None are inferred, or raise UserError.

    Axes are those of :class:`MeshShape`; ``dp`` is dp_replicate x dp_shard. If neither of the two is set, there is one
    copy. ``ep`` must divide dp_shard x cp x sp. ``keys``: axis -> name of its degree in errors, by default as in
    recipes. An error lists degrees that would fit.
    """
    model = {"pp": pp, "cp": cp, "sp": sp, "tp": tp}
    given = {"pp": pp, "dp": dp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, **model, "ep": ep}
    key = {axis: keys.get(axis, axis) for axis in given}
    problems = [
        f"{key[axis]}={n!r} is not a whole number of at least 1"
        for axis, n in given.items()
        if not ((type(n) is int and n >= 1) or (n is None and axis in _INFERRED))
    ]
    if not problems:
        problems = _model_problems(world_size, {key[axis]: degree for axis, degree in model.items()})
    if not problems:
        ranks_left = world_size // math.prod(model.values())
        problems = _data_problems(ranks_left, dp, dp_replicate, dp_shard, key)
    if not problems:
        if dp_shard is None:
            dp_shard = ranks_left // (dp_replicate or 1)
        shape = MeshShape(dp_replicate=ranks_left // dp_shard, dp_shard=dp_shard, ep=ep, **model)
        fsdp = shape.size("fsdp")
        if fsdp % ep == 0:
            return shape
        product = " x ".join(key[axis] for axis in PRODUCTS["fsdp"])
        problems = [f"{key['ep']}={ep} must divide {product} = {fsdp}; {_would_fit(_divisors(fsdp))}"]
    noun = "rank" if world_size == 1 else "ranks"
    raise UserError("\n".join([f"these degrees do not fit {world_size} {noun}:", *problems]))


def _model_problems(world_size: int, degrees: Mapping[str, int]) -> list[str]:
    """Check the degrees that split a sample or the model; the remaining ranks are data parallel."""
    product = math.prod(degrees.values())
    if world_size % product == 0:
        return []
    split = {axis: degree for axis, degree in degrees.items() if degree > 1}
    listed = " x ".join(f"{axis}={degree}" for axis, degree in split.items())
    problems = [f"{listed} needs a multiple of {product} ranks, found {world_size}"]
    for axis, degree in split.items():
        ranks_left, rest = divmod(world_size, product // degree)
        if not rest:
            problems.append(f"{axis}={degree}: {_would_fit(_divisors(ranks_left))}")
    return problems


def _data_problems(
    ranks_left: int, dp: int | None, dp_replicate: int | None, dp_shard: int | None, key: Mapping[str, str]
) -> list[str]:
    if dp is not None and dp != ranks_left:
        return [f"{key['dp']}={dp} must be {ranks_left}, the number of ranks that the other degrees leave"]
    copies, shards, divide = key["dp_replicate"], key["dp_shard"], f"must divide {key['dp']}"
    if dp_shard is None:
        if dp_replicate is not None and ranks_left % dp_replicate:
            return [f"{copies}={dp_replicate} {divide}; {_would_fit(_divisors(ranks_left))}"]
        return []
    if ranks_left % dp_shard:
        return [f"{shards}={dp_shard} {divide}; {_would_fit(_divisors(ranks_left))}"]
    if dp_replicate not in (None, ranks_left // dp_shard):
        fitting = [(ranks_left // shard, shard) for shard in _divisors(ranks_left)]
        pairs = ", ".join(f"{replicate} x {shard}" for replicate, shard in fitting)
        return [f"{copies} x {shards} = {dp_replicate} x {dp_shard} must be {ranks_left}: one of {pairs}"]
    return []


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _would_fit(degrees: Sequence[int]) -> str:
    return f"{', '.join(map(str, degrees))} would fit"
