"""How the ranks of a run are factorised into named axes. Pure arithmetic: no process group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnitrain.errors import UserError

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "ep_fsdp", "ep", "tp")
_INFERRED = ("dp", "dp_replicate", "dp_shard")
_RECIPE_KEYS = {"sp": "ulysses"}  # the axis is that of sequence parallelism, the key says by which method
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "sequence": ("cp", "sp"),
    "fsdp": ("dp_shard", "cp", "sp"),
    "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
}


@dataclass(frozen=True)
class MeshShape:
    """One factorisation of ``world_size`` ranks.

    Ranks are counted along the axes in this order, the last one fastest:

        pp x dp_replicate x dp_shard x cp x sp x tp       every parameter but the experts
        pp x dp_replicate x ep_fsdp  x  ep     x tp       the experts

    so that ep x ep_fsdp = dp_shard x cp x sp, and neighbours in rank are neighbours in ``tp``, then ``sp`` (or ``ep``).
    Four products have names of their own: ``dp`` = dp_replicate x dp_shard, the ranks with samples of their own;
    ``sequence`` = cp x sp, which share every row of tokens; ``fsdp`` = dp_shard x sequence, over which parameters are
    sharded; ``loss`` = dp_replicate x fsdp, over which losses add up.

    Make one with :func:`fit_mesh`, which checks it.
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
        """All ranks."""
        return self.size(*DENSE_AXES)

    @property
    def ep_fsdp(self) -> int:
        """Ranks over which an expert's parameters are sharded."""
        return self.dp_shard * self.cp * self.sp // self.ep

    def size(self, *axes: str) -> int:
        """Ranks along the product of ``axes``."""
        return math.prod(int(getattr(self, axis)) for axis in _expanded(axes))

    def groups(self, *axes: str) -> np.ndarray:
        """All groups of ranks that differ in nothing but their places on ``axes``.

        Args:
            axes: names of axes of one of the two views, and of products. None: every rank is a group.

        Returns:
            ``[number of groups, size of each]`` int64, ascending both in and between groups.
        """
        grid, inside = self._grid(axes)
        outside = [index for index in range(grid.ndim) if index not in inside]
        return grid.transpose(outside + inside).reshape(-1, self.size(*axes))

    def group(self, rank: int, *axes: str) -> np.ndarray:
        """``[size]`` int64: the group of ``rank``, itself included, ascending."""
        grid, inside = self._grid(axes)
        place = np.unravel_index(rank, grid.shape)
        return grid[tuple(slice(None) if index in inside else at for index, at in enumerate(place))].reshape(-1)

    def places(self, *axes: str) -> np.ndarray:
        """``[world_size]`` int64: each rank's place in its group on the product of ``axes``."""
        groups = self.groups(*axes)
        places = np.empty(self.world_size, dtype=np.int64)
        places[groups] = np.arange(groups.shape[1])
        return places

    def place(self, rank: int, *axes: str) -> int:
        """Place of ``rank`` in its group on the product of ``axes``, such as its ``dp`` rank."""
        return int(np.searchsorted(self.group(rank, *axes), rank))

    def __str__(self) -> str:
        degrees = {axis: getattr(self, axis) for axis in (*DENSE_AXES, "ep")}
        return " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one rank"

    def _sizes(self, view: Sequence[str]) -> tuple[int, ...]:
        return tuple(int(getattr(self, axis)) for axis in view)

    def _grid(self, axes: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """All ranks, one dim per axis of the view that has ``axes``, and the dims of ``axes``."""
        expanded = _expanded(axes)
        view = _view(expanded)
        grid = np.arange(self.world_size).reshape(self._sizes(view))
        return grid, [index for index, axis in enumerate(view) if axis in expanded]


def _expanded(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for axis in axes for part in PRODUCTS.get(axis, (axis,)))


def _view(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The view that has all these axes."""
    for view in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(view) and len(set(axes)) == len(axes):
            return view
    raise ValueError(f"no view has the axes {axes}; expected some of {DENSE_AXES} or of {EXPERT_AXES}, each once")


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
    """The factorisation of ``world_size`` ranks with these degrees; those that are None are inferred.

    Args:
        world_size: all ranks.
        pp: pipeline stages.
        dp: dp_replicate x dp_shard; None: the ranks that the other degrees leave.
        dp_replicate: copies of the parameters. If both this and ``dp_shard`` are None, there is one copy.
        dp_shard: data-parallel ranks that share one copy.
        cp: ranks that share a sequence, attending around a ring.
        sp: ranks that share a sequence, exchanging it for heads in attention (Ulysses).
        tp: ranks that share every layer's matrices.
        ep: ranks that share one copy of the experts; divides dp_shard x cp x sp.
        keys: axis -> what the user calls its degree, for errors; left out: as the axis. The default is for recipes.

    Raises:
        UserError: all degrees that do not fit, each with those that would.
    """
    given = {"pp": pp, "dp": dp, "dp_replicate": dp_replicate, "dp_shard": dp_shard}
    given |= {"cp": cp, "sp": sp, "tp": tp, "ep": ep}
    key = {axis: keys.get(axis, axis) for axis in given}
    problems = [
        f"{key[axis]} is {n!r}; a degree is a whole number from 1"
        for axis, n in given.items()
        if not (_is_degree(n) or (n is None and axis in _INFERRED))
    ]
    if not problems:
        model = {"pp": pp, "cp": cp, "sp": sp, "tp": tp}
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
        problems = [f"{key['ep']} is {ep} and must divide {product} = {fsdp}; {_would_fit(_divisors(fsdp))}"]
    raise UserError("\n".join([f"these degrees do not fit {world_size} ranks:", *problems]))


def _is_degree(value: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _model_problems(world_size: int, degrees: Mapping[str, int]) -> list[str]:
    """The degrees that split a sample or the model; what is left of the ranks is data parallel."""
    product = math.prod(degrees.values())
    if world_size % product == 0:
        return []
    split = {axis: degree for axis, degree in degrees.items() if degree > 1}
    listed = " x ".join(f"{axis} {degree}" for axis, degree in split.items())
    problems = [f"{listed} = {product} and must divide {world_size}"]
    for axis, degree in split.items():
        ranks_left, rest = divmod(world_size, product // degree)
        if not rest:
            problems.append(f"{axis} is {degree}; {_would_fit(_divisors(ranks_left))}")
    return problems


def _data_problems(
    ranks_left: int, dp: int | None, dp_replicate: int | None, dp_shard: int | None, key: Mapping[str, str]
) -> list[str]:
    if dp is not None and dp != ranks_left:
        return [f"{key['dp']} is {dp} and must be {ranks_left}, the ranks that the other degrees leave"]
    copies, shards, divide = key["dp_replicate"], key["dp_shard"], f"must divide {key['dp']}"
    if dp_shard is None:
        if dp_replicate is not None and ranks_left % dp_replicate:
            return [f"{copies} is {dp_replicate} and {divide}; {_would_fit(_divisors(ranks_left))}"]
        return []
    if ranks_left % dp_shard:
        return [f"{shards} is {dp_shard} and {divide}; {_would_fit(_divisors(ranks_left))}"]
    if dp_replicate not in (None, ranks_left // dp_shard):
        fitting = [(ranks_left // shard, shard) for shard in _divisors(ranks_left)]
        pairs = ", ".join(f"{replicate} x {shard}" for replicate, shard in fitting)
        return [f"{copies} x {shards} is {dp_replicate} x {dp_shard} and must be {ranks_left}: one of {pairs}"]
    return []


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _would_fit(degrees: Sequence[int]) -> str:
    return f"{', '.join(map(str, degrees))} would fit"
