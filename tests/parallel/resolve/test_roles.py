"""What a component may not set: one table, which the page shows and which refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omnitrain.parallel.resolve.roles import REFUSALS, Refusal, media_keys, refused
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
    return f"| {refusal.role} | {fields}{values} | {refusal.reason} |\n"


def with_table(page: str) -> str:
    """The page with the table of the code."""
    head = "| component | fields | why not |\n|---|---|---|\n"
    return re.sub(rf"{re.escape(head)}(?:\|.*\n)*", lambda _: head + "".join(map(row, REFUSALS)), page)


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert REFUSALS[0].reason in page and with_table(page) == page, "run python -m tests.parallel.resolve.test_roles"


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.role}-{refusal.fields[0]}")
def test_each_field_is_refused_once_with_its_reason(refusal: Refusal) -> None:
    for field in refusal.keys:
        plan = plan_of({field: value_of(refusal, field)})
        ((found, text),) = refused([refusal.role], plan)
        assert (found, text.endswith(f"but {refusal.reason}")) == (field, True)


def test_values_without_effect_are_not_refused() -> None:
    plan = ComponentPlan(pp=1, cp=1, ulysses=1, tp=1, compile=False)
    assert not [*refused(["all but the foundation", "a teacher", "a component of a section"], plan)]


def test_a_cost_of_zero_is_a_value() -> None:
    ((field, text),) = refused(["a projector in `main`"], ComponentPlan(quadratic_cost=0.0))
    assert field == "quadratic_cost" and text.startswith("found 0.0, but a projector in `main`")


def test_a_role_takes_the_keys_of_the_default_that_it_may_set() -> None:
    assert media_keys(["a decoder", "all but the foundation"]) == ["quadratic_cost"]
    assert media_keys(["a component of a section"]) == ["quadratic_cost", "encode.features_on", "encode.call_elements"]
    assert media_keys(["a projector in `main`"]) == [] and len(media_keys(["all but the foundation"])) == 5


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
