import json
import math
import runpy
from pathlib import Path

import pytest

from omnitrain.train.metrics.console import console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHARED = {"harness", "turns", "omni_step", "repo_samples", "slow_link", "simulated_ranks", "process_groups"}
OF_A_GPU = {"gpu_day"}  # test_gpu_day.py
KEPT = {"any_to_any"}  # test_any_to_any.py
SIZES = {
    "pipeline": ["--rounds=1", "--ranks", "2", "--width=64", "--tokens=64"],
    "encoders": ["--rounds=1", "--width=64", "--text=32", "--grid=4", "--bits=0"],
    "sections": [*("--rounds=1", "--number=4", "--width=64", "--text=32", "--grid=4", "--sleep-grid=4", "--bits=0")],
    "published_gains": [],
    "step_counts": ["--kinds", "text", "--compiled", "--worlds", "64", "--tiny"],
    "overlap_tables": [],
    "pipeline_peers": ["--rounds=1", "--blocks", "8", "--width=16", "--tokens=8"],
    "plan_search": ["--parts", "dense"],
    "wavefront": ["--seeds=1", "--small=2", "--large=2"],
    "many_ranks": ["--rounds=1", "--worlds", "4", "8", "--real=0"],
    "step_plan": ["--rounds=1", "--steps=1", "--items=10"],
    "step_overhead": ["--rounds=1", "--steps=1", "--skip=0"],
    "padding": ["--rounds=1", "--steps=1", "--samples=200"],
    "verified": ["--samples=2", "--layouts", "dp2"],
    "packing": ["--rounds=1", "--samples=1000"],
    "cost_balance": ["--rounds=1", "--samples=512"],
    "data_start": ["--rounds=1", "--lines=2000", "--megabytes=2"],
    "media_throughput": ["--rounds=1", "--samples=64"],
    "load": ["--rounds=1", "--width=64"],
    "checkpoint": ["--rounds=1", "--width=64", "--steps=1"],
    "loss": ["--rounds=1", "--tokens=512", "--classes=20000", "--hidden=32"],
    "divergence": ["--rounds=1", "--tokens=512", "--classes=20000", "--hidden=32"],
    "layouts": ["--rounds=1", "--steps=1", "--tokens=64"],
    "long_context": ["--rounds=1", "--budgets=1.5", "--lengths=4"],
    "ulysses": ["--rounds=1", "--tokens=64", "--hidden=128", "--rate=0"],
    "attention": ["--rounds=1", "--steps=1", "--row=16", "--tokens=64"],
    "overlap_1f1b": [
        "--rounds=1",
        *("--tokens=64", "--hidden=64", "--inner=64", "--layers=2"),
        *("--ratios", "2", "--micro-batches", "2", "--unlimited"),
    ],
    "moe_overlap": [
        "--rounds=1",
        "--tokens=32",
        "--hidden=256",
        "--inner=16",
        "--experts=8",
        "--chunks=4",
        "--unlimited",
    ],
    "moe_dispatch": ["--rounds=1", "--tokens=64", "--hidden=16", "--inner=16"],
    "two_commits": [str(BENCHMARKS.parent), "--rounds=1", "--names=padding", "--arguments=--steps=1 --samples=200"],
}
SIMULATED = {"step_counts", "published_gains", "overlap_tables", "wavefront", "plan_search"}  # without rounds
FAST = (SIMULATED - {"plan_search", "step_counts"}) | {
    "packing",
    "cost_balance",
    "step_plan",
    "loss",
    "divergence",
    "attention",
    "moe_dispatch",
}  # CI runs most others, too


def test_every_benchmark_is_tested():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - SHARED - OF_A_GPU - KEPT == set(SIZES)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SIZES])
def test_a_benchmark_prints_its_formula_and_writes_its_figures(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "result.json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("sys.argv", [name, f"--json={path}", *SIZES[name]])
    monkeypatch.setattr(console, "quiet", False)
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    result = json.loads(path.read_text())
    assert set(result) - {"gpu"} == {"name", "formula", "figures", "rounds", "versions", "cpu"}
    assert result["name"] == name
    assert result["formula"] in capsys.readouterr().out
    assert {len(values) for values in result["rounds"].values()} == (set() if name in SIMULATED else {1})
    assert all(isinstance(value, float) and math.isfinite(value) for value in result["figures"].values())
    assert all(value > 0 for values in result["rounds"].values() for value in values)
