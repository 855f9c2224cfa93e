"""Encoders with ranks of their own train as one process, beside every other parallelism and with frozen parts."""

from __future__ import annotations

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from tests.parallel.schedule.separate import each_value, factory, in_turn
from tests.parallel.sections.layouts import Case, combinations_in, possible, samples, table

pytestmark = pytest.mark.ranks
IN_FP32 = [case for case in table() if not case.precision]  # bf16 is in the slow rows
DEFAULT = each_value(IN_FP32)


def require_equal(sections: RankPool, cases: list[Case]) -> None:
    """``cases``: of one model and step, in which the same parameters are trained."""
    model, trained, data = cases[0].model, cases[0].trained, cases[0].data
    layouts = [case.layout for case in cases]
    report = verify(
        factory(model, trained), samples(model, data), layouts, nproc=sections.nproc, timeout_s=120, pool=sections
    )
    assert {row.layout: row.status for row in report.rows} == dict.fromkeys(map(str, layouts), "equal"), str(report)


def test_the_table_has_every_possible_pair_of_values() -> None:
    assert len(table()) <= 120
    assert set().union(*map(combinations_in, table())) == set().union(*map(combinations_in, possible()))


def test_the_default_rows_have_each_value_of_the_table() -> None:
    cases = [case for together in DEFAULT for case in together]
    assert len(cases) <= 12
    assert set().union(*map(enumerate, cases)) == set().union(*map(enumerate, IN_FP32))


@pytest.mark.parametrize("cases", in_turn(DEFAULT, first=2))
def test_each_value_of_a_section_trains_as_one_process(sections: RankPool, cases: list[Case]) -> None:
    require_equal(sections, cases)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "trained", "data"), sorted({(c.model, c.trained, c.data) for c in table()}))
def test_every_pair_of_the_table_trains_as_one_process(sections: RankPool, model: str, trained: str, data: str) -> None:
    require_equal(sections, [c for c in table() if (c.model, c.trained, c.data) == (model, trained, data)])
