from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from omnitrain.errors import ScheduleError
from omnitrain.parallel.placement import pipeline_shape
from omnitrain.plan.schedule import table
from omnitrain.plan.schedule.actions import Kind, Schedule
from omnitrain.plan.schedule.generators import KINDS
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.table import table_of
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.recipe.plan_groups import PipelineSchedule


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    table._complete.cache_clear()
    yield
    table._complete.cache_clear()


@pytest.mark.parametrize("settings", [PipelineSchedule(), PipelineSchedule(chunks=2), PipelineSchedule(kind="gpipe")])
def test_a_schedule_without_any_one_of_its_actions_is_refused_before_it_runs(
    settings: PipelineSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = table_of(pipeline_shape(ComponentPlan(pp=2, schedule=settings)), 2)
    for rank, row in enumerate(whole.actions):
        for index, action in enumerate(row):
            rows = [list(actions) for actions in whole.actions]
            del rows[rank][index]
            monkeypatch.setattr(table, "lower", lambda _, rows=rows: whole.with_actions(rows))
            table._complete.cache_clear()
            with pytest.raises(ScheduleError) as caught:
                table_of(pipeline_shape(ComponentPlan(pp=2, schedule=settings)), 2)
            assert str(action) in str(caught.value), (action, str(caught.value))


def test_a_schedule_is_made_and_validated_once_for_each_number_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(schedule: Schedule) -> Schedule:
        made.append(schedule.num_micro_batches)
        return lower(schedule)

    monkeypatch.setattr(table, "lower", counted)
    schedules = [table_of(pipeline_shape(ComponentPlan(pp=2)), m) for m in (3, 4, 3, 4, 3)]
    assert made == [3, 4] and schedules[0] is schedules[2]
    assert any(action.kind is Kind.RECV_F for action in schedules[0].actions[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reduces_its_first_stage_last(kind: str) -> None:
    """So this stage may own the units that several stages of the rank read."""
    for ranks, chunks, number in product((2, 4), (2, 3) if kind == "interleaved" else (None,), (4, 8, 9)):
        plan = ComponentPlan(pp=ranks, schedule=PipelineSchedule(kind=kind, chunks=chunks))
        schedule = table_of(pipeline_shape(plan), number)
        for rank, row in enumerate(schedule.actions):
            reduced = [action.stage for action in row if action.kind is Kind.REDUCE]
            assert reduced[-1] == schedule.stages_of(rank)[0]
