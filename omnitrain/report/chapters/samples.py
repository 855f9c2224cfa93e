"""The chapter of held-out samples, and how the answers to them changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from omnitrain.page.html import Cell, Raw, chapter, heading, note, table
from omnitrain.report.media import MediaBudget
from omnitrain.report.run_record import Line, RunRecord

_EVALUATIONS = 6  # of a run: the first, the last, and some between
_LETTERS = 1500  # of a text

Column = tuple[int, int]  # run, step
Saved = tuple[Path, Line]  # the samples of an evaluation, and their folder


@dataclass
class _Sample:
    """A held-out row with all answers to it."""

    source: str
    prompt: Sequence[Mapping[str, str]]
    reference: Sequence[Mapping[str, str]]
    folder: Path
    answers: dict[Column, tuple[Path, Sequence[Mapping[str, str]]]] = field(default_factory=dict)


def samples(runs: Sequence[RunRecord], room: int) -> str:
    """Return a table for each source: what was asked, the reference, and the answers of each evaluation.

    Args:
        runs: the runs.
        room: bytes for images and sounds. The first sample of every source comes first.
    """
    columns, found = _collected(runs)
    budget = MediaBudget(room)
    rows: dict[str, list[list[Cell]]] = {}
    for sample in _in_turn(found):
        cells: list[Cell] = [_parts(parts, sample.folder, budget) for parts in (sample.prompt, sample.reference)]
        for column in columns:
            answer = sample.answers.get(column)
            cells.append(None if answer is None else _parts(answer[1], answer[0], budget))
        rows.setdefault(sample.source, []).append(cells)
    titles = ["asked", "reference", *(_title(runs, column) for column in columns)]
    shown = [part for source in sorted(rows) for part in (heading(source), table(titles, rows[source]))]
    if not shown:
        shown = [note("No samples were generated yet, or the recipe has no evaluation.")]
    if budget.left_out:
        everything = budget.left_out + budget.shown
        words = f"{budget.left_out} of {everything} images and sounds are left out, to keep this page small."
        shown.insert(0, note(f"{words} All are in the folder samples of the run."))
    return chapter("samples", "Held-out samples", shown)


def _collected(runs: Sequence[RunRecord]) -> tuple[list[Column], list[_Sample]]:
    columns: list[Column] = []
    found: dict[tuple[str, str], _Sample] = {}
    for index, run in enumerate(runs):
        for folder, saved in _some(run.samples):
            column = (index, saved["step"])
            columns.append(column)
            for one in saved["samples"]:
                reference = one.get("reference_parts") or [{"text": one["reference"]}]
                new = _Sample(one["source"], one["prompt"], reference, folder)
                sample = found.setdefault((one["source"], one["id"]), new)
                sample.answers[column] = (folder, one["answer"])
    return columns, list(found.values())


def _some(evaluations: Sequence[Saved]) -> list[Saved]:
    """The first, the last, and evenly many between them."""
    if len(evaluations) <= _EVALUATIONS:
        return list(evaluations)
    return [evaluations[round(i * (len(evaluations) - 1) / (_EVALUATIONS - 1))] for i in range(_EVALUATIONS)]


def _in_turn(found: Sequence[_Sample]) -> list[_Sample]:
    """The first sample of each source, then the second of each, and so on."""
    counts: dict[str, int] = {}
    turns = []
    for sample in found:
        counts[sample.source] = counts.get(sample.source, 0) + 1
        turns.append((counts[sample.source], sample.source))
    return [sample for _, sample in sorted(zip(turns, found, strict=True), key=lambda pair: pair[0])]


def _title(runs: Sequence[RunRecord], column: Column) -> str:
    run, step = column
    return f"{runs[run].label}, step {step}" if len(runs) > 1 else f"step {step}"


def _parts(parts: Sequence[Mapping[str, str]], folder: Path, budget: MediaBudget) -> Raw:
    return Raw("".join(_part(part, folder, budget) for part in parts))


def _part(part: Mapping[str, str], folder: Path, budget: MediaBudget) -> str:
    if "file" in part:
        return budget.show(folder / Path(part["file"]).name)
    text = part["text"]
    cut = f" (and {len(text) - _LETTERS:,} more letters)" if len(text) > _LETTERS else ""
    return f"<p>{escape(text[:_LETTERS])}{cut}</p>"
