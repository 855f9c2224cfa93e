"""Encoders with a place, a window and a memory train as one process, under every parallelism and with frozen parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.run import micro_batches
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.layout import Layout, parse_layout
from tests.covering import pairs_in_fp32
from tests.parallel.laid_out import gradients
from tests.parallel.schedule.paired import one_by_one
from tests.parallel.schedule.separate import (
    MICRO_BATCHES,
    TP_PLAN,
    Case,
    build,
    each_value,
    factory,
    in_turn,
    internvl,
    possible,
    table,
)
from tests.parallel.schedule.test_layouts import samples_of

SEPARATE = [case for case in possible() if case.is_separate and not case.precision]  # bf16 is in the slow rows
DEFAULT = each_value([case for case in SEPARATE if case.layout.num_ranks <= 4])
WITH_EXPERTS = [case for case in table() if case.axis == "dp2.ep2"]


def require_equal(ranks: RankPool, cases: list[Case], timeout_s: float) -> None:
    """``cases``: of one model, in which the same parameters are trained."""
    model, trained = cases[0].model, cases[0].trained
    layouts = [case.layout for case in cases]
    samples = samples_of(model)
    report = verify(factory(model, trained), samples, layouts, nproc=ranks.nproc, timeout_s=timeout_s, pool=ranks)
    assert {row.layout: row.status for row in report.rows} == dict.fromkeys(map(str, layouts), "equal"), str(report)


def test_the_table_has_every_possible_pair_of_values() -> None:
    assert len(table()) <= 150
    assert set().union(*map(pairs_in_fp32, table())) == set().union(*map(pairs_in_fp32, possible()))


def test_the_default_rows_have_each_value_of_separate_encoders() -> None:
    cases = [case for together in DEFAULT for case in together]
    assert len(cases) <= 12
    assert set().union(*map(enumerate, cases)) == set().union(*map(enumerate, SEPARATE))


@pytest.mark.parametrize("cases", in_turn(DEFAULT, first=1))
def test_each_value_of_separate_encoders_trains_as_one_process(ranks: RankPool, cases: list[Case]) -> None:
    require_equal(ranks, cases, timeout_s=60)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8, preload=("omnitrain.parallel.verify.verify",)) as eight:
        yield eight


@pytest.mark.slow
@pytest.mark.parametrize(("model", "trained"), sorted({(case.model, case.trained) for case in table()}))
def test_every_pair_of_the_table_trains_as_one_process(eight_ranks: RankPool, model: str, trained: str) -> None:
    cases = [case for case in table() if (case.model, case.trained) == (model, trained)]
    require_equal(eight_ranks, cases, timeout_s=120)


def paired_and_one_by_one(case: Case) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Loss and gradients of the same step with pairs, and with each pair as a forward and then a backward."""
    plan = replace(case.layout, paired=True).plan()
    state = init_state_of(plan)
    model = build(case.model, case.trained)
    if not isinstance(model, OmniModel):
        model = build_omni_model(foundation=model)
    model = build_parallelize_model(model.train(), parallel_plan=plan, enable_mixed_precision=False)
    packs = micro_batches(model, samples_of(case.model), state.dp_size, MICRO_BATCHES)[state.dp_rank]
    batch = step_planner(model)(packs)
    with_pairs, found = schedule_of(model, batch.plan), []
    assert any(action.parts for row in with_pairs.actions for action in row)
    for schedule in (with_pairs, one_by_one(with_pairs)):
        model.zero_grad(set_to_none=True)
        loss = Executor(model, batch, {}).run(schedule)
        found.append((loss, gradients(model)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_EXPERTS, ids=lambda case: str(case.layout))
def test_pairs_of_micro_batches_change_no_bit(ranks: RankPool, case: Case) -> None:
    of_ranks = ranks.run(paired_and_one_by_one, case, timeout_s=120, world=case.layout.num_ranks)
    assert any(expected for _, (_, expected) in of_ranks)
    for (paired_loss, found), (loss, expected) in of_ranks:
        assert paired_loss.equal(loss) and found.keys() == expected.keys()
        assert [name for name, gradient in expected.items() if not found[name].equal(gradient)] == []


@dataclass(frozen=True)
class WithTower(Layout):
    """A layout whose image encoder has a tensor parallel degree of its own."""

    tower: int = 1
    place: str = "group"
    globs: bool = True

    def plan(self) -> ParallelPlan:
        encoder = ComponentPlan(tp=self.tower, place=self.place)
        tp_plan = TP_PLAN if self.globs and self.tower > 1 else None
        return super().plan().model_copy(update={"components": {"image_encoder": encoder}, "tp_plan": tp_plan})

    def __str__(self) -> str:
        return f"{super().__str__()} tower {self.tower} {self.place}"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", "group"])
def test_a_tower_is_whole_on_each_tensor_parallel_rank_of_the_foundation(ranks: RankPool, place: str) -> None:
    layout = WithTower(**vars(parse_layout("tp4")), tower=1, place=place)
    report = verify(partial(internvl, 4), samples_of("internvl"), [layout], timeout_s=60, pool=ranks)
    assert [row.status for row in report.rows] == ["equal"], str(report)


@pytest.mark.slow
def test_a_tower_on_two_of_four_tensor_parallel_ranks_trains_beside_every_other_parallelism(
    eight_ranks: RankPool,
) -> None:
    words = {"dp2.tp4.recompute.accum2": "group world local", "sp2.tp4": "group world", "cp2.tp4": "group world local"}
    words |= {"pp2.tp4.accum2": "group world"}
    layouts = [
        WithTower(**vars(parse_layout(word)), tower=2, place=place) for word in words for place in words[word].split()
    ]
    samples = samples_of("internvl")
    report = verify(partial(internvl, 8), samples, layouts, nproc=8, timeout_s=120, pool=eight_ranks)
    assert {row.layout: row.status for row in report.rows} == dict.fromkeys(map(str, layouts), "equal"), str(report)


@pytest.mark.slow
def test_a_tower_without_a_plan_of_its_matrices_is_refused_with_what_to_do(ranks: RankPool) -> None:
    layout = WithTower(**vars(parse_layout("tp4")), tower=2, globs=False)
    report = verify(partial(internvl, 4), samples_of("internvl"), [layout], timeout_s=60, pool=ranks)
    assert [row.status for row in report.rows] == ["refused"], str(report)
