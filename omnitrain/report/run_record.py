"""Read the files that a run wrote to its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.summary import component_rows
from omnitrain.ops.fused.install import FusedOp
from omnitrain.parallel.layout import ModelLayout
from omnitrain.report.doctor import examine
from omnitrain.report.svg import Line

LAYOUT_FILE, ENVIRONMENT_FILE = "layout.json", "environment.json"


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder that a report shows."""

    label: str  # name of the run, another one for each run of a report
    recipe_text: str  # the resolved recipe as YAML, and ``recipe``, read
    recipe: Mapping[str, Any]
    lines: Sequence[Line]  # the lines of ``metrics.jsonl``, at least one; numbers that are not finite are None
    evaluations: Sequence[Line]  # all evaluations of the run, by steps done
    # answers of these evaluations: contents of each ``samples.json``, and its folder, by steps done
    samples: Sequence[tuple[Path, Line]]
    traces: Mapping[int, Mapping[int, Path]]  # step -> rank -> file of the trace
    layout: Mapping[str, Any] | None  # contents of ``layout.json``; None: the run wrote none
    environment: Sequence[Line] | None  # findings about the machine; None: the run wrote none

    @property
    def last(self) -> Line:
        """The last line of metrics."""
        return self.lines[-1]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read the runs in ``folders``; UserError: one is named twice, has no run, or no metrics."""
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if resolved.count(path) > 1:
            raise UserError(f"{folder} is named twice; name each run once")
    labels = distinct_labels(resolved)
    return [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]


def distinct_labels(paths: Sequence[Path]) -> list[str]:
    """Return the name of each path, with as many of its parents as make all of them differ."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _read(folder: Path, label: str) -> RunRecord:
    saved = folder / "recipe.yaml"
    if not saved.is_file():
        raise UserError(f"{folder} is not the folder of a run (no recipe.yaml); name the output_dir of one")
    lines = _json_lines(folder / "metrics.jsonl")
    if not lines:
        raise UserError(
            f"{folder} has no metrics yet; the run writes the first line of metrics.jsonl after train.log_every steps"
        )
    text = saved.read_text(encoding="utf-8")
    evaluations = _json_lines(folder / "evaluations.jsonl") or [*filter(None, [_json(folder / "eval.json")])]
    return RunRecord(
        label=label,
        recipe_text=text,
        recipe=yaml.safe_load(text) or {},
        lines=lines,
        evaluations=evaluations,
        samples=_samples(folder / "samples"),
        traces=_traces(folder / "trace"),
        layout=_json(folder / LAYOUT_FILE),
        environment=_json(folder / ENVIRONMENT_FILE),
    )


def _json_lines(file: Path) -> list[Line]:
    """Return the whole lines of a file; a run may be writing the last one."""
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.is_file() else ""
    found = [_parsed(line) for line in whole.splitlines()]
    return [line for line in found if isinstance(line, dict) and "step" in line]


def _json(file: Path) -> Any:
    """Return the content of a file, or None: it does not exist, or its end is missing."""
    return _parsed(file.read_text(encoding="utf-8")) if file.is_file() else None


def _parsed(text: str) -> Any:
    """Numbers that are not finite are None: JSON does not have them, and Python writes them as constants."""
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except ValueError:
        return None


def _samples(folder: Path) -> list[tuple[Path, Line]]:
    found = [(file.parent, _json(file)) for file in (*folder.glob("step-*/samples.json"), folder / "samples.json")]
    return sorted((pair for pair in found if pair[1]), key=lambda pair: pair[1]["step"])


def _traces(folder: Path) -> dict[int, dict[int, Path]]:
    found: dict[int, dict[int, Path]] = {}
    for file in sorted(folder.glob("step-*-rank-*.json")):
        _, step, _, rank = file.stem.split("-")
        found.setdefault(int(step), {})[int(rank)] = file
    return {step: dict(sorted(files.items())) for step, files in sorted(found.items())}


def write_facts(
    folder: Path, model: OmniModel, ops: Mapping[str, Mapping[str, FusedOp]], layout: ModelLayout | None
) -> None:
    """Write both files, on the first rank; ``ops``: component -> result of :func:`fuse_ops`."""
    _write(folder / LAYOUT_FILE, layout_facts(model, ops, layout))
    _write(folder / ENVIRONMENT_FILE, [asdict(finding) for finding in examine(imports=False)])


def layout_facts(
    model: OmniModel, ops: Mapping[str, Mapping[str, FusedOp]], layout: ModelLayout | None
) -> dict[str, Any]:
    """Return ``components`` and ``layout`` (rows of the start's tables), ``sections`` (meshes) and ``placements``."""
    rows = [] if layout is None else layout.table(model)
    return {
        "components": [asdict(row) for row in component_rows(model, ops)],
        "layout": [asdict(row) for row in rows],
        "sections": [] if layout is None else layout.facts_of_sections(),
        "placements": [] if layout is None else layout.topology.facts(),
    }


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
