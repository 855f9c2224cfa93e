"""``omnitrain report``: one page about runs. A run writes its own when it ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from markupsafe import Markup

from omnitrain.report import traced_steps
from omnitrain.report.html import rendered, swatch, table, write_page
from omnitrain.report.media import MediaBudget
from omnitrain.report.mesh import mesh_picture
from omnitrain.report.run_record import Line, RunRecord, read_runs
from omnitrain.report.svg import Curve, Metrics, draw_curves, styles

_EVALUATIONS = 6  # of a run: the first, the last, and some between
_LETTERS = 1500  # of a text

Parts = tuple[Path, Sequence[Mapping[str, str]]]  # of a message, and the folder of their files


def _samples(runs: Sequence[RunRecord], room: int) -> Markup:
    """Return a table for each source: question, reference, answers; its media have ``room``, in bytes."""
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


REPORT_FILE = "report.html"
_LARGEST = 4_700_000  # bytes of a page, media included
_MARKS = {True: "ok", False: Markup('<span class="bad">problem</span>'), None: "optional"}
_MOST_CURVES = 24  # more in one figure cannot be told apart


def report_at_end(folder: Path, say: Callable[[str], Any]) -> Callable[..., None]:
    """Return an exit callback that writes the report unless an error ended the run; it never raises, but says."""

    def write(kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            return
        try:
            say(f"report: {write_report([folder], folder / REPORT_FILE)}")
        except Exception as problem:  # a page that cannot be drawn must not fail hours of training
            words = " ".join(str(problem).split()) or type(problem).__name__
            say(f"no report was written: {words}; `omnitrain report {folder}` tries again")

    return write


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write one page about the runs in ``folders`` to ``output``; UserError: no run, no metrics, no writing."""
    runs = read_runs(folders)
    labels = [run.label for run in runs]
    steps, metrics = traced_steps.traced_steps(runs), Metrics([run.lines for run in runs])
    body = rendered(
        "report.html",
        runs=runs,
        overview=[_overview(run) for run in runs],
        curves=partial(_figures, labels, metrics),
        heldout=partial(_figures, labels, Metrics([_heldout_lines(run) for run in runs])),
        scores=partial(_figures, labels, Metrics([run.evaluations for run in runs])),
        worst_load=_figure(labels, "Tokens of the busiest expert / mean, in the worst layer", _worst_load(runs)),
        skipped=_skipped,
        costs_by_rank=_costs_by_rank,
        take=metrics.take,
        others=partial(_others, labels, metrics),
        samples=partial(_samples, runs),
        room=_LARGEST,
        steps=steps,
        legend=traced_steps.legend(steps),
        mesh_picture=mesh_picture,
        differences=_differences(runs),
        named=lambda rows, keys: [[name, *map(row.get, keys)] for name, row in rows.items()],
        machine=lambda found: [[*map(one.get, ("section", "name", "found")), _MARKS[one["ok"]]] for one in found],
    )
    return write_page(", ".join(labels), "report", body, output)


def _figures(labels: Sequence[str], metrics: Metrics, title: str, *patterns: str) -> Markup:
    """The curves of the paths that match (see :meth:`Metrics.take`), each figure with its table; perhaps nothing."""
    figures = sorted(metrics.take(*patterns).items())
    return Markup("").join(_figure(labels, ": ".join(filter(None, (title, name))), curves) for name, curves in figures)


def _figure(labels: Sequence[str], title: str, curves: Sequence[Curve]) -> Markup:
    """Curves over steps, and a table that is their legend: first, last, lowest and highest value of each."""
    if not curves:
        return Markup("")
    has_one_name = len({curve.name for curve in curves}) == 1
    rows = []
    for curve, (color, dash) in zip(curves, styles(curves), strict=True):
        label, values = labels[curve.run], curve.values
        name = curve.name if len(labels) == 1 else label if has_one_name else f"{curve.name}, {label}"
        rows.append([swatch(color, name, dash), values[0], values[-1], min(values), max(values)])
    legend = table(["", "first", "last", "lowest", "highest"], rows)
    svg, left = draw_curves(curves[:_MOST_CURVES], title), len(curves) - _MOST_CURVES
    return rendered("figure.html", title=title, svg=svg, legend=legend, left=left)


def _others(labels: Sequence[str], metrics: Metrics) -> tuple[list[str], Markup]:
    """Metrics that no chapter took: names of figures that are 0 in every line, and the other figures."""
    taken = metrics.take(r"(?P<figure>[^/]+)(?:/(?P<name>.+))?")
    zeros = [name for name, curves in taken.items() if not any(any(curve.values) for curve in curves)]
    return zeros, Markup("").join(_figure(labels, name, curves) for name, curves in taken.items() if name not in zeros)


def _overview(run: RunRecord) -> list[Any]:
    """The last values of a run."""
    last, heldout = run.last, _heldout_lines(run)
    return [
        run.label,
        last["step"],
        run.recipe.get("train", {}).get("steps"),
        last.get("loss"),
        heldout[-1]["heldout"].get("loss") if heldout else None,
        last.get("tokens_per_second"),
        last.get("memory_mb"),
        sum(last.get("rejected", {}).values()),
        None if run.layout is None else sum(math.prod(one["axes"].values()) for one in run.layout["sections"]) or 1,
    ]


def _heldout_lines(run: RunRecord) -> list[Line]:
    """Steps with held-out losses, from metrics and from evaluations, which also measure them."""
    found = {line["step"]: line["losses"] for line in run.evaluations if line.get("losses")}
    found |= {line["step"]: line["heldout"] for line in run.lines if line.get("heldout")}
    return [{"step": step, "heldout": losses} for step, losses in sorted(found.items())]


def _worst_load(runs: Sequence[RunRecord]) -> list[Curve]:
    curves = []
    for index, run in enumerate(runs):
        loads = [(line["step"], [row["load"] for row in line.get("experts", {}).values()]) for line in run.lines]
        if any(of_layers for _, of_layers in loads):
            curves.append(Curve(index, "load", [(step, max(known, default=None)) for step, known in loads]))
    return curves


def _skipped(run: RunRecord) -> list[tuple[str, str, int]]:
    """Source, reason and number of rows skipped up to the last line, the most frequent first."""
    reasons = run.last.get("rejected_reasons") or {}
    rows = [(source, reason, count) for source, counts in reasons.items() for reason, count in counts.items()]
    return sorted(rows, key=lambda row: -row[2])


def _costs_by_rank(encoders: Mapping[str, Line]) -> list[list[Any]]:
    """A table of the cost of each rank's items, its titles first; nothing if too many ranks are listed."""
    costs = {name: row["cost"]["by_rank"] for name, row in encoders.items() if "by_rank" in row.get("cost", {})}
    ranks = range(max(map(len, costs.values()), default=0))
    titles = ["cost by rank", *(f"rank {rank}" for rank in ranks)]
    return [titles, *([name, *of_ranks] for name, of_ranks in costs.items())] if costs else []


def _differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Key of the recipes that differs, and its value in each run."""
    leaves = [dict(_leaves(run.recipe)) for run in runs]
    keys = dict.fromkeys(key for of_run in leaves for key in of_run)
    differ = [key for key in keys if len({repr(of_run.get(key)) for of_run in leaves}) > 1]
    return [[key, *(str(of_run[key]) if key in of_run else "" for of_run in leaves)] for key in differ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
