"""The number of chunks that a run finds out by itself."""

from __future__ import annotations

from omnitrain.models.build import build_omni_model
from omnitrain.parallel.expert_chunks import ExpertChunks, candidates, fastest
from omnitrain.parallel.ranks import RankPool
from tests.parallel import factories
from tests.parallel.laid_out import laid_out


def test_numbers_of_chunks_are_powers_of_two_up_to_the_fewest_experts_of_a_rank() -> None:
    assert [candidates(fewest) for fewest in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)]


def test_a_step_takes_as_long_as_its_slowest_rank_and_one_slow_step_decides_nothing() -> None:
    #                chunks 1,   2,   4, in turn, three times
    first_rank = [3.0, 1.0, 2.0, 3.0, 9.0, 2.0, 3.0, 1.0, 2.0]
    assert fastest((1, 2, 4), [first_rank]) == 2
    other_rank = [1.0, 4.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0, 1.0]
    assert fastest((1, 2, 4), [first_rank, other_rank]) == 4


def test_of_equal_times_the_smallest_number_stays() -> None:
    assert fastest((1, 2, 4), [[2.0, 1.0, 1.0] * 3]) == 2


def taken(earlier: int) -> tuple[set[int], int | None, set[int]]:
    """With two experts per rank: chunks as laid out, what is left of a number found earlier, and chunks then."""
    built = build_omni_model(foundation=factories.qwen3_moe())
    model = laid_out({"ep": 2, "expert_chunks": "auto"}, state={"ep_size": 2}, model=built)
    dispatchers = ExpertChunks(model)._dispatchers
    before = {dispatcher.chunks for dispatcher in dispatchers}
    return before, ExpertChunks(model, earlier).settled, {dispatcher.chunks for dispatcher in dispatchers}


def test_an_earlier_number_stays_where_ranks_have_as_many_experts(ranks: RankPool) -> None:
    assert ranks.run(taken, 1, timeout_s=60, world=2)[0] == ({2}, 1, {1})
    assert ranks.run(taken, 4, timeout_s=60, world=2)[0] == ({2}, None, {2})
