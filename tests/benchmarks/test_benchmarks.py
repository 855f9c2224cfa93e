import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SIZES = {
    "step_overhead": ["--rounds=1", "--steps=1"],
    "padding": ["--rounds=1", "--steps=1", "--samples=200"],
}


def test_every_benchmark_is_tested():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - {"harness"} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_benchmark_prints_its_formula_and_writes_its_figures(name, tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), f"--json={path}", *SIZES[name]]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=here, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(path.read_text())
    assert set(result) == {"name", "formula", "figures", "rounds", "versions", "cpu"}
    assert result["name"] == name
    assert result["formula"] in ran.stdout
    assert {len(values) for values in result["rounds"].values()} == {int(SIZES[name][0].partition("=")[2])}
    assert all(isinstance(value, float) for value in result["figures"].values())
    assert all(value > 0 for values in result["rounds"].values() for value in values)
