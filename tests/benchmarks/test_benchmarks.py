import importlib
import json
import math
import runpy
import weakref
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch

from omnitrain.recipe import ParallelPlan
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.train.metrics.console import console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHARED = {"harness", "omni_step", "repo_samples", "slow_link", "expert_loopback", "simulated_ranks", "process_groups"}
SHARED |= {f"gpu_{part}" for part in ("harness", "sizes", "operations", "batches", "sides")}
SIZES = {
    "pipeline": ["--rounds=1", "--ranks", "2", "--width=64", "--tokens=64"],
    "encoders": ["--rounds=1", "--width=64", "--text=32", "--grid=4", "--bits=0"],
    "sections": [*("--rounds=1", "--number=4", "--width=64", "--text=32", "--grid=4", "--sleep-grid=4", "--bits=0")],
    "published_gains": [],
    "overlap_tables": [],
    "wavefront": ["--seeds=1", "--small=2", "--large=2"],
    "many_ranks": ["--rounds=1", "--worlds", "4", "8", "--real=0"],
    "step_plan": ["--rounds=1", "--steps=1", "--items=10"],
    "step_overhead": ["--rounds=1", "--steps=1", "--skip=0"],
    "padding": ["--rounds=1", "--steps=1", "--samples=200"],
    "packing": ["--rounds=1", "--samples=1000"],
    "cost_balance": ["--rounds=1", "--samples=512"],
    "data_start": ["--rounds=1", "--lines=2000", "--megabytes=2"],
    "media_throughput": ["--rounds=1", "--samples=64"],
    "load": ["--rounds=1", "--width=64"],
    "checkpoint": ["--rounds=1", "--width=64", "--steps=1"],
    "loss": ["--rounds=1", "--tokens=512", "--classes=20000", "--hidden=32"],
    "layouts": ["--rounds=1", "--steps=1", "--tokens=64"],
    "gpu_train": ["--rounds=3", "--seconds=0", "--steps=1", "--tiny"],
    "gpu_moe": ["--rounds=3", "--seconds=0", "--steps=1", "--tiny"],
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
SIMULATED = {"published_gains", "overlap_tables", "wavefront"}  # without rounds
FAST = SIMULATED | {
    "packing",
    "cost_balance",
    "step_plan",
    "many_ranks",
    "step_overhead",
    "loss",
    "attention",
    "moe_dispatch",
}  # CI runs most others, too


def test_every_benchmark_is_tested():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - SHARED == set(SIZES)


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


@pytest.fixture
def gpu(monkeypatch):
    """Modules of the benchmarks on one GPU, by what their names end in."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(BENCHMARKS.parent)
    return lambda part: importlib.import_module(f"gpu_{part}")


def test_a_side_begins_when_the_model_of_the_one_before_is_gone(gpu, monkeypatch):
    device = torch.device("cpu")
    given = Namespace(tokens=128, rounds=1, steps=1, seconds=0, device=device)
    sizes, sides, harness = gpu("sizes"), gpu("sides"), gpu("harness")
    config, made, fresh = sizes.config_of("text", sizes.TINY, 1), [], sides.fresh

    def noted(*arguments):
        model = fresh(*arguments)
        made.append(weakref.ref(model))
        return model

    def then():
        return harness.Measured(tokens_per_second=[float(made[0]() is None)])

    monkeypatch.setattr(sides, "fresh", noted)
    batches = gpu("batches").batches_of("text", sizes.TINY, config, given)
    run = partial(sides.run_omnitrain, config, batches, given, ComponentPlan())
    found = dict(harness.measured_one_by_one(device, {"ours": run, "then": then}))
    assert found["then"].tokens_per_second == [1.0]


def test_a_wrong_exchange_of_experts_takes_no_figures_with_it(gpu, monkeypatch, capsys):
    def wrong(*_):
        raise AssertionError("step 3: NaN")

    gpu_moe = gpu("moe")
    monkeypatch.setattr(gpu_moe, "check_late_rows", wrong)
    monkeypatch.setattr(gpu_moe, "measured_one_by_one", lambda device, sides: [(side, None) for side in sides])
    monkeypatch.setattr(gpu_moe, "loss_error", lambda found: 0.0)
    monkeypatch.setattr(gpu_moe, "_result", lambda found, limit, more: more)
    device = torch.device("cpu")
    given = Namespace(tiny=True, device=device, loopback=5, layers=1, tokens=128, rounds=1, steps=1, eager=False)
    figures = gpu_moe.measure(given)
    assert (figures["loopback_steps"], figures["failed_sides"]) == (0.0, 1.0)
    assert "loopback failed" in capsys.readouterr().out


def test_a_plan_of_every_variant_can_be_made_on_a_gpu(gpu):
    gpu_moe = gpu("moe")
    given = Namespace(device=torch.device("cuda"), eager=False)
    plans = {name: gpu_moe.plan_of(variant, given) for name, variant in gpu_moe.VARIANTS.items()}
    made = {name: ParallelPlan(components={"foundation": plan}) for name, plan in plans.items()}
    assert {name for name, plan in made.items() if plan.of("foundation").compile} == {"permutation", "loss"}
    assert [name for name, plan in made.items() if plan.of("foundation").recompute == "full"] == ["recompute"]


def test_hf_has_its_grouped_products_in_bf16_too(gpu, monkeypatch):
    multiply, seen = torch.nn.functional.grouped_mm, set()

    def noted(rows, weights, **options):
        seen.add((rows.dtype, weights.dtype))
        return multiply(rows, weights, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    experts = importlib.import_module("expert_loopback").experts_of_a_layer(torch.device("cpu"), torch.float32)
    hidden, index, weights = torch.randn(5, 64), torch.tensor([[0, 7]] * 5), torch.rand(5, 2)
    found = gpu("moe").grouped_mm_in_bf16(experts, hidden, index, weights)
    torch.testing.assert_close(found, experts(hidden, index, weights), rtol=0.05, atol=0.05)
    seen.discard((torch.float32, torch.float32))  # of ours
    assert seen == {(torch.bfloat16, torch.bfloat16)} and found.dtype == torch.float32
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in experts.parameters()} == {torch.float32}


def test_a_side_that_fails_is_named_and_takes_no_other_with_it(gpu, capsys):
    def fails():
        raise MemoryError("too much")

    def works():
        return gpu("harness").Measured(tokens_per_second=[3.0])

    found = dict(gpu("harness").measured_one_by_one(torch.device("cpu"), {"one": fails, "other": works}))
    assert [(side, measured.tokens_per_second) for side, measured in found.items()] == [("other", [3.0])]
    assert "one failed" in (printed := capsys.readouterr()).out and "MemoryError: too much" in printed.err
