"""Any number of packs runs on any number of ranks; advice tells where ranks wait, and what would fit."""

from __future__ import annotations

import pytest

from omnitrain.parallel.state import state_without_groups
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.train.micro_batches import check_micro_batches, micro_batches_of_rank


def recipe_with(micro_batches: int, **parallel: object) -> Recipe:
    return Recipe.load("quickstart", [f"train.packs_per_step={micro_batches}"]).model_copy(
        update={"parallel": ParallelPlan.model_validate({"default": parallel})}
    )


def told(micro_batches: int, ranks: int, **parallel: object) -> list[str]:
    recipe = recipe_with(micro_batches, **parallel)
    return check_micro_batches(recipe, state_without_groups(recipe.parallel, ranks))


@pytest.mark.parametrize(
    ("micro_batches", "ranks", "advice"),
    [
        (4, 3, "micro-batch 2 of 2 of a step is on 1 of them only, and the others wait; 3 or 6 would fit"),
        (11, 4, "micro-batch 3 of 3 of a step is on 3 of them only, and the others wait; 8 or 12 would fit"),
        (4, 6, "1 or 2 of them divide a pack, and the latter wait; 3 or 6 would fit"),
        (5, 7, "1 or 2 of them divide a pack, and the latter wait; 1 or 7 would fit"),
    ],
)
def test_ranks_that_wait_are_told_with_the_nearest_numbers_that_fit(
    micro_batches: int, ranks: int, advice: str
) -> None:
    assert told(micro_batches, ranks) == [
        f"train.packs_per_step {micro_batches} on {ranks} data-parallel ranks: {advice}"
    ]


def test_numbers_that_fit_and_ranks_that_have_the_same_packs_need_no_advice() -> None:
    for micro_batches, ranks in ((4, 2), (4, 4), (2, 4), (3, 1)):
        assert told(micro_batches, ranks) == []
    assert told(2, 4, ulysses=2) == told(3, 2, tp=2) == []
    assert len(told(3, 4, ulysses=2)) == 1
    assert check_micro_batches(recipe_with(3), None) == []


def test_a_rank_has_as_many_micro_batches_as_the_fullest() -> None:
    for micro_batches, ranks, expected in ((4, 3, 2), (7, 3, 3), (8, 4, 2), (2, 5, 1)):
        recipe = recipe_with(micro_batches)
        assert micro_batches_of_rank(recipe, state_without_groups(recipe.parallel, ranks)) == expected


def test_a_pipeline_with_too_few_packs_that_do_not_fit_either_gets_both_lines() -> None:
    uneven, short = told(3, 8, pp=4)
    assert uneven.startswith("train.packs_per_step 3 on 2 data-parallel ranks: micro-batch 2 of 2")
    assert short.startswith("1f1b on 4 pipeline ranks needs 4 micro-batches per rank and step")
