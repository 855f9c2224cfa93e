"""Divide a model's blocks into stages, by cost or by the user's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

from omnitrain.errors import ScheduleError

Blocks = tuple[int, int]  # blocks [start, stop) of a stage


def split_by_cost(
    block_costs: Sequence[float],
    stage_ranks: Sequence[int],
    *,
    first: float = 0.0,
    last: float = 0.0,
    legal_cuts: Collection[int] | None = None,
) -> tuple[Blocks, ...]:
    """Divide blocks into stages so that the busiest rank has as little to do as possible.

    The costliest stage is as cheap as possible, and with that limit the stages as equal as possible. Then single cuts
    move while that makes the busiest rank less busy: a rank with several stages (``stage_ranks``) has the sum of their
    costs. ``first`` and ``last`` are costs of what these stages do outside of blocks: embedding and towers; norm, head
    and loss. ``legal_cuts``: blocks before which the model can be cut; None: any. Raises ScheduleError: more stages
    than blocks, or than legal cuts allow.
    """
    num_blocks, num_stages = len(block_costs), len(stage_ranks)
    cuts = _cuts(num_blocks, legal_cuts)
    if num_stages > num_blocks:
        raise ScheduleError(
            f"{num_stages} stages need at least {num_stages} blocks, but the model has {num_blocks}; "
            "use fewer pipeline ranks or fewer stages on each"
        )
    if num_stages > len(cuts) + 1:
        raise ScheduleError(
            f"this model can be cut only before block {_listed(cuts)}: at most {len(cuts) + 1} stages, not "
            f"{num_stages}; use fewer pipeline ranks or fewer stages on each"
        )
    sums = [0.0, *accumulate(block_costs)]
    places = [0, *cuts, num_blocks]

    def cost(stage: int, start: int, stop: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    def weigh(bounds: Sequence[int]) -> tuple[float, float, float]:
        stages = [cost(stage, *blocks) for stage, blocks in enumerate(pairwise(bounds))]
        ranks = [sum(c for c, r in zip(stages, stage_ranks, strict=True) if r == rank) for rank in set(stage_ranks)]
        return max(ranks), max(stages), sum(c * c for c in stages)

    limit = max(
        cost(stage, *blocks) for stage, blocks in enumerate(pairwise(_partition(places, num_stages, cost, max)))
    )
    bounds = _partition(places, num_stages, cost, lambda so_far, c: so_far + c * c if c <= limit else math.inf)
    return tuple(pairwise(_moved_while_better(bounds, cuts, weigh)))


def split_by_numbers(
    numbers: Sequence[int], num_blocks: int, num_stages: int, *, legal_cuts: Collection[int] | None = None
) -> tuple[Blocks, ...]:
    """Divide blocks into stages of given sizes, or raise ScheduleError; ``legal_cuts``: see :func:`split_by_cost`."""
    written = ", ".join(map(str, numbers))
    if len(numbers) != num_stages:
        raise ScheduleError(f"split [{written}] has {len(numbers)} numbers, but the pipeline has {num_stages} stages")
    if min(numbers) < 1:
        raise ScheduleError(f"split [{written}]: each stage needs at least 1 block")
    if sum(numbers) != num_blocks:
        raise ScheduleError(
            f"split [{written}] adds up to {sum(numbers)} blocks, but the model has {num_blocks}; change the numbers"
        )
    bounds = [0, *accumulate(numbers)]
    cuts = _cuts(num_blocks, legal_cuts)
    illegal = [bound for bound in bounds[1:-1] if bound not in cuts]
    if illegal:
        raise ScheduleError(
            f"split [{written}] cuts before block {_listed(illegal)}, but this model can be cut only before "
            f"block {_listed(cuts)}"
        )
    return tuple(pairwise(bounds))


def _cuts(num_blocks: int, legal_cuts: Collection[int] | None) -> list[int]:
    every = range(1, num_blocks)
    return list(every) if legal_cuts is None else sorted(set(legal_cuts) & set(every))


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks)) or "none"


def _partition(
    places: Sequence[int], num_stages: int, cost: Callable[[int, int, int], float], add: Callable[[float, float], float]
) -> list[int]:
    """Return the bounds of stages for which costs, put together by ``add``, are least.

    ``best[i]``: the least total of the stages so far if the last of them ends at ``places[i]``, and their bounds.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(num_stages):
        last = len(places) - (num_stages - stage)
        best = {
            end: min(
                (add(total, cost(stage, places[start], places[end])), [*bounds, places[end]])
                for start, (total, bounds) in best.items()
                if start < end
            )
            for end in (range(stage + 1, last + 1) if stage < num_stages - 1 else [last])
        }
    return best[len(places) - 1][1]


def _moved_while_better(
    bounds: list[int], cuts: list[int], weigh: Callable[[Sequence[int]], tuple[float, ...]]
) -> list[int]:
    """Move single cuts to other legal places between their neighbours, while that weighs less."""
    while True:
        moves = (
            [*bounds[:i], cut, *bounds[i + 1 :]]
            for i in range(1, len(bounds) - 1)
            for cut in cuts
            if bounds[i - 1] < cut < bounds[i + 1]
        )
        better = min(moves, key=weigh, default=bounds)
        if weigh(better) >= weigh(bounds):
            return bounds
        bounds = better
