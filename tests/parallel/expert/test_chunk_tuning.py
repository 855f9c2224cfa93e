"""The number of chunks that a run finds out by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.expert import chunk_tuning as expert_chunks
from omnitrain.parallel.expert.chunk_tuning import ExpertChunks, candidates, fastest
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.peers import SINGLE_PROCESS
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
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


def test_each_component_gets_the_number_that_is_fastest_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, foundation = SimpleNamespace(chunks=4), SimpleNamespace(chunks=4)
    layers = [("image_encoder", tower, 2), ("foundation", foundation, 4), ("foundation", foundation, 5)]
    monkeypatch.setattr(expert_chunks, "_measured_layers", lambda model: layers)
    clock, taken = [0.0], []
    monkeypatch.setattr(expert_chunks.time, "perf_counter", lambda: clock[0])
    chunks: Any = ExpertChunks(None)
    while chunks.settled is None:
        with chunks.measured(100, SINGLE_PROCESS):
            taken.append((tower.chunks, foundation.chunks))
            clock[0] += tower.chunks + {1: 3.0, 2: 1.0, 4: 2.0}[foundation.chunks]
    of_tower, of_foundation = [(1, 4), (2, 4)], [(1, 1), (1, 2), (1, 4)]
    assert taken == [of_tower[0], *3 * of_tower, of_foundation[0], *3 * of_foundation]
    assert chunks.settled == {"image_encoder": 1, "foundation": 2}
    assert (tower.chunks, foundation.chunks) == (1, 2)


def test_numbers_that_were_measured_take_the_place_of_auto_and_of_nothing_else() -> None:
    auto, two = ComponentPlan(experts={"chunks": "auto"}), ComponentPlan(experts={"chunks": 2})
    plan = ParallelPlan(default=auto, components={"a": auto, "b": two})
    found = plan.with_expert_chunks({"a": 8, "foundation": 4, "c": 1})
    assert found.default.experts.chunks is None
    numbers = {name: own.experts.chunks for name, own in found.components.items()}
    assert numbers == {"a": 8, "b": 2, "foundation": 4, "c": 1}


def taken(earlier: dict[str, int]) -> tuple[set[int], dict[str, int] | None, set[int]]:
    """With two experts per rank: chunks as laid out, what is left of a number found earlier, and chunks then."""
    built = build_omni_model(foundation=factories.qwen3_moe())
    model = laid_out({"ep": 2, "experts": {"chunks": "auto"}}, state={"ep_size": 2}, model=built)
    dispatchers = ExpertChunks(model)._dispatchers["foundation"]
    before = {dispatcher.chunks for dispatcher in dispatchers}
    return before, ExpertChunks(model, earlier).settled, {dispatcher.chunks for dispatcher in dispatchers}


def test_an_earlier_number_stays_where_ranks_have_as_many_experts(ranks: RankPool) -> None:
    earlier = {"foundation": 1}
    assert ranks.run(taken, earlier, timeout_s=60, world=2)[0] == ({2}, earlier, {1})
    assert ranks.run(taken, {"foundation": 4}, timeout_s=60, world=2)[0] == ({2}, None, {2})
