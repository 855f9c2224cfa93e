"""The chapter of the layout: a picture of the ranks, and tables of the components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnitrain.page.html import Cell, chapter, heading, note, table
from omnitrain.plan.mesh_picture import mesh_picture
from omnitrain.report.chapters.plots import Plots
from omnitrain.report.run_record import RunRecord


def layout(runs: Sequence[RunRecord], plots: Plots) -> str:
    """Return pictures of meshes and tables of components."""
    return chapter("layout", "Layout", [part for run in runs for part in _of_run(run, plots, len(runs) > 1)])


def _of_run(run: RunRecord, plots: Plots, is_named: bool) -> Iterator[str]:
    if is_named:
        yield heading(run.label)
    if run.layout is None:
        yield note("This run wrote no layout.json.")
        return
    for index, section in enumerate(run.layout["sections"]):
        yield mesh_picture(section, index, plots.name())
    if not run.layout["sections"]:
        yield note("One process has the whole model.")
    yield heading("Components")
    yield _table(run.layout["components"], ("name", "class_name", "parameters", "trainable", "dtype", "ops"))
    if rows := run.layout["layout"]:
        yield heading("Layout (mesh: copies x shards; dtypes: parameters / compute / sums)")
        columns = ["name", "section", "mode", "mesh", "units", "dtypes", "recompute", "offload", "sequence"]
        yield _table(rows, [name for name in columns if name != "section" or any(row["section"] for row in rows)])


def _table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    titles = {"name": "component", "class_name": "class"}
    cells: list[list[Cell]] = [[row[key] for key in keys] for row in rows]
    return table([titles.get(key, key) for key in keys], cells)
