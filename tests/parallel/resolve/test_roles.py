"""What a component may not set: one table, which the page shows and which refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnitrain.parallel.resolve.roles import REFUSALS, Refusal, refused
from omnitrain.recipe.parallel import ComponentPlan, plan_of
from omnitrain.recipe.plan_groups import PipelineSchedule

PAGE = Path(__file__).parents[3] / "docs" / "parallel.md"
VALUES = {
    "place": "world",
    "encode.features_on": "cpu",
    "schedule": PipelineSchedule(kind="zbv"),
    "quadratic_cost": 0.5,
}
SWITCHES = ("async_ulysses", "sequence_parallel", "compile")


def value_of(refusal: Refusal, field: str) -> object:
    return refusal.values[0] if refusal.values else True if field in SWITCHES else VALUES.get(field, 2)


def row(refusal: Refusal) -> str:
    fields = ", ".join(f"`{field}`" for field in refusal.fields)
    values = f" {' or '.join(f'`{value}`' for value in refusal.values)}" * bool(refusal.values)
    return f"| {refusal.role} | {fields}{values} | {refusal.reason} |"


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    assert "\n".join(map(row, REFUSALS)) in text


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.role}-{refusal.fields[0]}")
def test_each_field_is_refused_once_with_its_reason(refusal: Refusal) -> None:
    for field in refusal.fields:
        plan = plan_of({field: value_of(refusal, field)})
        ((found, text),) = refused([refusal.role], plan)
        assert (found, text.endswith(f"but {refusal.reason}")) == (field, True)


def test_values_without_effect_are_not_refused() -> None:
    plan = ComponentPlan(pp=1, cp=1, ulysses=1, tp=1, compile=False)
    assert not [*refused(["all but the foundation", "a teacher", "a component of a section"], plan)]


def test_a_cost_of_zero_is_a_value() -> None:
    ((field, text),) = refused(["a projector in `main`"], ComponentPlan(quadratic_cost=0.0))
    assert field == "quadratic_cost" and text.startswith("found 0.0, but a projector in `main`")
