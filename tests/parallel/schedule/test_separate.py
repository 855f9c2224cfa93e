"""Encoders with a place, a window and a memory train as one process, under every parallelism and with frozen parts."""

from __future__ import annotations

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from tests.parallel.schedule.pipelines import pairs
from tests.parallel.schedule.separate import Case, each_value, factory, possible, table
from tests.parallel.schedule.test_layouts import samples_of

SEPARATE = [case for case in table() if case.is_separate]
DEFAULT = [*each_value(SEPARATE)]


def require_equal(ranks: RankPool, cases: list[Case], timeout_s: float) -> None:
    """``cases``: of one model, in which the same parameters are trained."""
    model, trained = cases[0].model, cases[0].trained
    layouts = [case.layout for case in cases]
    report = verify(factory(model, trained), samples_of(model), layouts, timeout_s=timeout_s, pool=ranks)
    assert {row.layout: row.status for row in report.rows} == dict.fromkeys(map(str, layouts), "equal"), str(report)


def test_the_table_has_every_possible_pair_of_values() -> None:
    assert len(table()) <= 150
    assert set().union(*map(pairs, table())) == set().union(*map(pairs, possible()))


def test_the_default_rows_have_each_value_of_separate_encoders() -> None:
    assert len(DEFAULT) <= 12
    assert set().union(*map(enumerate, DEFAULT)) == set().union(*map(enumerate, SEPARATE))


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: str(case.layout))
def test_each_value_of_separate_encoders_trains_as_one_process(ranks: RankPool, case: Case) -> None:
    require_equal(ranks, [case], timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "trained"), sorted({(case.model, case.trained) for case in table()}))
def test_every_pair_of_the_table_trains_as_one_process(ranks: RankPool, model: str, trained: str) -> None:
    require_equal(ranks, [case for case in table() if (case.model, case.trained) == (model, trained)], timeout_s=120)
