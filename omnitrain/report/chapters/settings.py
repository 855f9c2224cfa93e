"""The chapters of recipes and machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from omnitrain.page.html import Raw, chapter, heading, note, table
from omnitrain.report.run_record import RunRecord


def recipe(runs: Sequence[RunRecord]) -> str:
    """Return the resolved recipes, and the keys in which they differ."""
    parts = [_differences(runs)] if len(runs) > 1 else []
    for run in runs:
        name = f"{run.label}: " if len(runs) > 1 else ""
        parts.append(
            f"<details><summary>{escape(name)}recipe.yaml</summary><pre>{escape(run.recipe_text)}</pre></details>"
        )
    return chapter("recipe", "Recipe", parts)


def environment(runs: Sequence[RunRecord]) -> str:
    """Return what each run found on its machine when it started."""
    parts: list[str] = []
    for run in runs:
        parts += [heading(run.label)] if len(runs) > 1 else []
        if run.environment is None:
            parts.append(note("This run wrote no environment.json."))
            continue
        rows = [[one["section"], one["name"], one["found"], _mark(one["ok"])] for one in run.environment]
        parts.append(table(("", "name", "found", ""), rows))
    return chapter("environment", "Environment", parts)


def _mark(is_ok: bool | None) -> Raw:
    return Raw({True: "ok", False: '<span class="bad">problem</span>', None: "optional"}[is_ok])


def _differences(runs: Sequence[RunRecord]) -> str:
    leaves = [dict(_leaves(run.recipe)) for run in runs]
    keys = list(dict.fromkeys(key for of_run in leaves for key in of_run))
    differ = [key for key in keys if len({repr(of_run.get(key)) for of_run in leaves}) > 1]
    rows = [[key, *(_shown(of_run, key) for of_run in leaves)] for key in differ]
    return heading("Keys that differ") + table(["key", *(run.label for run in runs)], rows)


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return str(leaves[key]) if key in leaves else ""


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
