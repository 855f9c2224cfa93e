"""Write what a run knows at its start and its report shows: ``layout.json`` and ``environment.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.summary import component_rows
from omnitrain.ops.fused.install import FusedOp
from omnitrain.parallel.layout import ModelLayout
from omnitrain.report.doctor import examine
from omnitrain.report.run_record import ENVIRONMENT_FILE, LAYOUT_FILE


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
