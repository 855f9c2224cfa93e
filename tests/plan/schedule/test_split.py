import itertools
import random

import pytest

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.generators import stage_ranks
from omnitrain.plan.schedule.split import split_by_cost, split_by_numbers


def loads(split: tuple[tuple[int, int], ...], costs: list[float], ranks: tuple[int, ...], first: float, last: float):
    stages = [sum(costs[start:stop]) for start, stop in split]
    stages[0] += first
    stages[-1] += last
    return [sum(cost for cost, r in zip(stages, ranks, strict=True) if r == rank) for rank in range(max(ranks) + 1)]


def test_equal_blocks_are_divided_equally() -> None:
    assert split_by_cost([1.0] * 8, (0, 1, 0, 1)) == ((0, 2), (2, 4), (4, 6), (6, 8))


def test_a_head_that_costs_as_much_as_two_blocks_takes_two_blocks_less() -> None:
    assert split_by_cost([1.0] * 6, (0, 1), last=2.0) == ((0, 4), (4, 6))
    assert split_by_cost([1.0] * 6, (0, 1), first=2.0) == ((0, 2), (2, 6))


@pytest.mark.parametrize("seed", range(6))
def test_the_busiest_rank_of_single_stages_is_the_least_possible(seed: int) -> None:
    rng = random.Random(seed)
    costs = [float(rng.randint(1, 9)) for _ in range(9)]
    first, last = float(rng.randint(0, 5)), float(rng.randint(0, 9))
    cuts = sorted(rng.sample(range(1, 9), 6))
    ranks = stage_ranks(4, 1)
    split = split_by_cost(costs, ranks, first=first, last=last, legal_cuts=cuts)
    assert {start for start, _ in split[1:]} <= set(cuts)
    every = (tuple(itertools.pairwise((0, *chosen, 9))) for chosen in itertools.combinations(cuts, 3))
    assert max(loads(split, costs, ranks, first, last)) == min(max(loads(s, costs, ranks, first, last)) for s in every)


def test_a_rank_with_the_embedding_and_the_head_gets_fewer_blocks() -> None:
    ranks = stage_ranks(4, 2, is_v=True)
    split = split_by_cost([1.0] * 30, ranks, first=1.0, last=3.0)
    assert sorted(loads(split, [1.0] * 30, ranks, 1.0, 3.0)) == [8.0, 8.0, 9.0, 9.0]


def test_the_users_numbers_are_taken_as_they_are() -> None:
    assert split_by_numbers([3, 1, 2], 6, 3) == ((0, 3), (3, 4), (4, 6))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([3, 4], r"split \[3, 4\] has 2 numbers, but the pipeline has 3 stages"),
        ([3, 2, 2], r"split \[3, 2, 2\] adds up to 7 blocks, but the model has 6"),
        ([3, 0, 3], r"split \[3, 0, 3\]: each stage needs at least 1 block"),
        ([3, 1, 2], r"cuts before block 3, but this model can be cut only before block 2, 4"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_words(numbers: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        split_by_numbers(numbers, 6, 3, legal_cuts=(2, 4))


def test_more_stages_than_blocks_or_cuts_are_refused_in_words() -> None:
    with pytest.raises(ScheduleError, match="8 stages need at least 8 blocks, but the model has 6"):
        split_by_cost([1.0] * 6, stage_ranks(4, 2))
    with pytest.raises(ScheduleError, match="can be cut only before block 2, 4: at most 3 stages, not 4"):
        split_by_cost([1.0] * 6, stage_ranks(4, 1), legal_cuts=(2, 4))
