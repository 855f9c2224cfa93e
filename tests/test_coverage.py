"""``make coverage`` has a floor, below which it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.second
def test_too_few_covered_lines_are_a_failure(tmp_path: Path) -> None:
    def told_by(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
        return subprocess.run(
            [sys.executable, "-m", "coverage", *words],
            cwd=Path(__file__).parents[1],
            env=environment | {"COVERAGE_FILE": str(tmp_path / "data")},
            capture_output=True,
            text=True,
        )

    assert told_by("run", "-m", "omnitrain.terminal").returncode == 0
    assert told_by("combine").returncode == 0
    report = told_by("report")
    assert report.returncode == 2 and "less than fail-under=90" in report.stdout
    assert "omnitrain/terminal.py" in report.stdout and "omnitrain/train/trainer.py" in report.stdout
