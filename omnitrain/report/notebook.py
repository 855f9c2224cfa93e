"""Models, layouts and plans as the outputs of a notebook's cells."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.summary import component_rows
from omnitrain.parallel.layout import LAYOUT_COLUMNS, LAYOUT_TITLE, LayoutTable, ModelLayout
from omnitrain.recipe import ParallelPlan
from omnitrain.report.html import part_of_notebook, rendered, table
from omnitrain.report.mesh import mesh_picture

_OF_PLAN = ("component", "section", "mode", "mesh", "units", "recompute", "offload", "sequence")


@singledispatch
def as_html(shown: Any) -> str:
    """Return what a notebook shows of a model, a layout, its table, or a parallel plan."""
    raise TypeError(f"found {type(shown).__name__}; expected OmniModel, ModelLayout, LayoutTable or ParallelPlan")


@as_html.register
def _(model: OmniModel) -> str:
    titles = ("component", "class", "parameters", "trainable", "dtype", "ops")
    rows = [
        (row.name, row.class_name, row.parameters, row.trainable or "frozen", row.dtype, row.ops)
        for row in component_rows(model)
    ]
    return _titled((type(model).__name__, table(titles, rows)))


@as_html.register
def _(layout: ModelLayout) -> str:
    """Pictures of the ranks, and a table without sizes, which :meth:`ModelLayout.table` has."""
    pictures = (mesh_picture(facts, index) for index, facts in enumerate(layout.facts_of_sections()))
    shown = _of_layout(layout.table(None), _OF_PLAN)
    return _titled(*((None, one) for one in pictures), ("Layout (mesh: copies x shards)", shown))


@as_html.register
def _(rows: LayoutTable) -> str:
    return _titled((LAYOUT_TITLE, _of_layout(rows, LAYOUT_COLUMNS)))


@as_html.register
def _(plan: ParallelPlan) -> str:
    """The keys that differ from their defaults."""
    plans = {"default": plan.default, **plan.components, **plan.sections}
    named = {name: one.model_dump(exclude_defaults=True) for name, one in plans.items()}
    keys = list(dict.fromkeys(key for one in named.values() for key in one))
    rows = [[name, *(_value(one.get(key)) for key in keys)] for name, one in named.items()]
    globs = [(name, found) for name, found in (("tp_plan", plan.tp_plan), ("ep_plan", plan.ep_plan)) if found]
    tables = ((name, table(("glob", "value"), [(glob, str(v)) for glob, v in found.items()])) for name, found in globs)
    return _titled(("Parallel plan", table(("", *keys), rows)), *tables)


def _titled(*parts: tuple[str | None, str]) -> str:
    return part_of_notebook(rendered("titled.html", parts=parts))


def _of_layout(rows: LayoutTable, columns: tuple[str, ...]) -> str:
    """Some columns of the table; without sections, it has no such column."""
    shown = [name for name in columns if name != "section" or any(row.section for row in rows)]
    fields = ["name" if name == "component" else name for name in shown]
    return table(shown, [[_frozen(name, getattr(row, name)) for name in fields] for row in rows])


def _frozen(column: str, value: Any) -> Any:
    return "frozen" if column == "trainable" and not value else value


def _value(value: Any) -> str | None:
    """The value of a key, as a table shows it."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(part)}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else None if value is None else str(value)
