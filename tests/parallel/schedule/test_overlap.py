"""A forward and a backward that run in turn give the bits of one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omnitrain.parallel.spawn.pool import RankPool
from tests.covering import pairs
from tests.parallel.schedule.paired import Case, num_ranks, paired_and_one_by_one, possible, table

DEFAULT = (
    pytest.param(Case("qwen3_moe", "pp1", "odd", "4", "full", "2", "dropout"), marks=pytest.mark.second),
    pytest.param(Case("glm4_moe", "pp1", "even", "4", "full", "4.delayed", "balance"), marks=pytest.mark.second),
    Case("qwen3_moe", "pp2.v2", "odd", "5", "parts", "1", "loss"),
)


def require_same_bits(ranks: RankPool, case: Case) -> None:
    results = ranks.run(paired_and_one_by_one, case, timeout_s=120, world=num_ranks(case))
    for paired, plain in results:
        assert torch.equal(paired.loss, plain.loss)
        assert paired.gradients.keys() == plain.gradients.keys()
        assert [n for n, gradient in plain.gradients.items() if not torch.equal(paired.gradients[n], gradient)] == []
        assert plain.turns == 0
    assert int(case.micro_batches) < 4 or any(paired.turns for paired, _ in results)


@pytest.mark.parametrize("case", DEFAULT, ids=" ".join)
def test_a_pair_gives_the_bits_of_a_forward_and_a_backward(ranks: RankPool, case: Case) -> None:
    require_same_bits(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in table() if num_ranks(case) <= 4], ids=" ".join)
def test_every_pair_of_values_gives_the_same_bits(ranks: RankPool, case: Case) -> None:
    require_same_bits(ranks, case)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8, preload=("tests.parallel.schedule.paired",)) as eight:
        yield eight


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in table() if num_ranks(case) == 8], ids=" ".join)
def test_every_pair_of_values_gives_the_same_bits_on_eight_ranks(eight_ranks: RankPool, case: Case) -> None:
    require_same_bits(eight_ranks, case)


def test_the_table_has_every_possible_pair_of_values() -> None:
    cases = table()
    assert len(cases) <= 150
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, possible()))
