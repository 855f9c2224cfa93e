"""Held-out samples, and how the answers to them changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from omnitrain.report.html import rendered
from omnitrain.report.media import MediaBudget
from omnitrain.report.run_record import Line, RunRecord

_EVALUATIONS = 6  # of a run: the first, the last, and some between
_LETTERS = 1500  # of a text

Parts = tuple[Path, Sequence[Mapping[str, str]]]  # of a message, and the folder of their files


def samples(runs: Sequence[RunRecord], room: int) -> Markup:
    """Return a table for each source: what was asked, the reference, and the answers of each evaluation.

    Images and sounds have ``room``, in bytes. The first sample of every source comes first.
    """
    columns: list[str] = []
    found: dict[tuple[str, str], dict[str, Parts]] = {}  # source and id -> column -> message
    for run in runs:
        for folder, saved in _some(run.samples):
            columns.append(f"{run.label}, step {saved['step']}" if len(runs) > 1 else f"step {saved['step']}")
            for one in saved["samples"]:
                reference = one.get("reference_parts") or [{"text": one["reference"]}]
                asked = {"asked": (folder, one["prompt"]), "reference": (folder, reference)}
                found.setdefault((one["source"], one["id"]), asked)[columns[-1]] = (folder, one["answer"])
    columns = ["asked", "reference", *columns]
    counts, turns = Counter[str](), []
    for (source, _), messages in found.items():
        counts[source] += 1
        turns.append((counts[source], source, messages))
    budget, rows = MediaBudget(room), dict[str, list[list[Any]]]()
    for _, source, messages in sorted(turns, key=lambda turn: turn[:2]):
        cells = [_shown(*messages[column], budget) if column in messages else None for column in columns]
        rows.setdefault(source, []).append(cells)
    return rendered("samples.html", columns=columns, rows=rows, budget=budget)


def _some(evaluations: Sequence[tuple[Path, Line]]) -> list[tuple[Path, Line]]:
    """The first, the last, and evenly many between them."""
    if len(evaluations) <= _EVALUATIONS:
        return list(evaluations)
    return [evaluations[round(i * (len(evaluations) - 1) / (_EVALUATIONS - 1))] for i in range(_EVALUATIONS)]


def _shown(folder: Path, parts: Sequence[Mapping[str, str]], budget: MediaBudget) -> Markup:
    return Markup("").join(
        budget.show(folder / Path(part["file"]).name) if "file" in part else _text(part["text"]) for part in parts
    )


def _text(text: str) -> Markup:
    cut = f" (and {len(text) - _LETTERS:,} more letters)" if len(text) > _LETTERS else ""
    return Markup("<p>{}{}</p>").format(text[:_LETTERS], cut)
