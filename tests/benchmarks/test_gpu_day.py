"""`make gpu`: what one phase does to the others, the form of its result, and how its phases measure."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu_day
import pytest
import torch
from gpu import batches, experts, loopback, measured, pack_wheels, profile, sides, sizes
from gpu_day import FAILED, KILLED, LATE, OK, PHASES, RESULT, Day, Phase, run_day
from pydantic import TypeAdapter

from omnitrain.errors import UserError
from omnitrain.recipe import Ops
from omnitrain.recipe.parallel import ComponentPlan

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
FAKES = {
    "first": "yield 'one', 1.0\n    (folder / 'trace.json').write_text('x' * 100)",
    "hangs": "yield 'before', 2.0\n    waits()",
    "dies": "yield 'before', 3.0\n    os.kill(os.getpid(), signal.SIGKILL)",
    "fails": "yield 'before', 'needs cuda'\n    raise SystemExit('wrong: this')",
    "last": "yield 'infinite', float('inf')\n    (folder / 'huge').write_text('x' * 2000)",
}


def fake(name: str, body: str) -> str:
    return f"import os, signal, time\n\ndef waits():\n    time.sleep(60)\n\ndef run(tiny, folder):\n    {body}\n"


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Day, Path]:
    """A day of small phases, of which some end badly, and its folder."""
    for name, body in FAKES.items():
        (tmp_path / f"{name}.py").write_text(fake(name, body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_day, "MOST_BYTES", 1000)
    phases = [Phase(name, 4.0 if name == "hangs" else 60.0) for name in FAKES]
    return run_day(phases, tmp_path / "day", tiny=True, at_once=len(phases)), tmp_path / "day"


def read(folder: Path) -> Day:
    """The result, whose fields and types are those of :class:`Day` and no others."""
    return TypeAdapter(Day).validate_json((folder / RESULT).read_text(), strict=True, extra="forbid")


def test_a_phase_that_hangs_dies_or_fails_loses_only_what_it_had_not_found(day: tuple[Day, Path]) -> None:
    made, folder = day
    assert read(folder) == made
    assert {name: (found.status, found.exit_code) for name, found in made.phases.items()} == {
        "first": (OK, 0),
        "hangs": (LATE, None),
        "dies": (KILLED, -9),
        "fails": (FAILED, 1),
        "last": (OK, 0),
    }
    assert {name: found.figures for name, found in made.phases.items()} == {
        "first": {"one": 1.0},
        "hangs": {"before": 2.0},
        "dies": {"before": 3.0},
        "fails": {"before": "needs cuda"},
        "last": {"infinite": "inf"},
    }
    assert any("hangs.py" in line and "waits" in line for line in made.phases["hangs"].said)  # its stack
    assert made.phases["fails"].said[-1] == "wrong: this" and made.phases["first"].said == []
    assert (made.files, made.left_out) == ({"trace.json": 100}, {"huge": 2000})
    assert sorted(file.name for file in folder.iterdir()) == [RESULT, "trace.json"]
    assert all(word in gpu_day.table(made) for word in ("needs cuda", "hangs", LATE, KILLED, "wrong: this"))


def test_a_figure_in_the_middle_of_which_a_phase_was_killed_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "figures").write_text('["one", 1.0]\n["two", "fai')
    assert gpu_day.written_figures(tmp_path / "figures") == {"one": 1.0}
    assert gpu_day.written_figures(tmp_path / "none") == {}


def test_the_page_of_a_gpu_has_each_phase_with_its_limit() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [row for phase in PHASES if (row := f"| `{phase.name}` | {phase.limit:.0f} s |") not in page] == []


def test_only_names_phases_in_their_order() -> None:
    names = [phase.name for phase in gpu_day.chosen("dense,right", tiny=False)]
    assert names == ["right", "dense"] and len(gpu_day.chosen(None, tiny=True)) == len(PHASES) == 8
    with pytest.raises(SystemExit, match="--only: found fast; expected some of machine,right,races"):
        gpu_day.chosen("fast", tiny=False)
    assert sum(phase.limit for phase in PHASES) <= 8 * 60


def test_packed_wheels_are_unpacked_once_and_found(tmp_path: Path) -> None:
    assert gpu_day.unpacked_wheels(tmp_path) is None
    with zipfile.ZipFile(tmp_path / "one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "")
    there = gpu_day.unpacked_wheels(tmp_path)
    assert there is not None and (there / "one" / "__init__.py").is_file()
    (there / "kept").touch()
    assert gpu_day.unpacked_wheels(tmp_path) == there and (there / "kept").exists()


def test_wheels_are_those_of_the_other_machine_and_of_our_versions() -> None:
    words = pack_wheels.command("3.12", ["manylinux_2_28_x86_64"], pack_wheels.NAMES, Path("wheels"))
    options = dict(pairwise(words))
    assert (options["--python-version"], options["--platform"]) == ("3.12", "manylinux_2_28_x86_64")
    assert "--no-deps" in words and options["--only-binary"] == ":all:"
    pins = {line.partition("==")[0].replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(pack_wheels.NAMES) - pins == {"liger-kernel"}  # not installed here; any version will do


def test_gaps_are_where_no_kernel_runs() -> None:
    spans = [("a", 0.0, 100.0), ("b", 10.0, 20.0), ("c", 149.0, 160.0), ("d", 300.0, 301.0), ("e", 400.0, 410.0)]
    assert profile.gaps(spans) == [(140.0, "c"), (99.0, "d")]
    figures = dict(profile.of_spans(spans))
    assert (figures["step ms"], figures["gaps above 50 us, ms"]) == (pytest.approx(0.41), pytest.approx(0.239))
    assert figures["kernel 1, ms in 1 x a"] == pytest.approx(0.1) and figures["gap 2, us, after d"] == 99.0


def test_kernels_whose_names_begin_alike_have_a_figure_each() -> None:
    figures = dict(profile.of_spans([("k" * 100 + "1", 0.0, 20.0), ("k" * 100 + "2", 20.0, 50.0)]))
    assert [value for name, value in figures.items() if name.startswith("kernel ")] == pytest.approx([0.03, 0.02])


LOAD = measured.Load(CPU, tokens=128, rounds=1, steps=1, seconds=0.0)


def test_a_side_begins_when_the_model_of_the_one_before_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    config, made, fresh = sizes.config_of("text", sizes.TINY, 1), [], sides.fresh

    def noted(*arguments: Any) -> Any:
        model = fresh(*arguments)
        made.append(weakref.ref(model))
        return model

    def then() -> measured.Measured:
        return measured.Measured([float(made[0]() is None)], [1.0])

    monkeypatch.setattr(sides, "fresh", noted)
    packs = batches.batches_of("text", sizes.TINY, config, LOAD)
    run = partial(sides.run_omnitrain, config, packs, LOAD, ComponentPlan(), Ops())
    found = measured.Sides(CPU)
    assert dict(found.run({"ours": run, "then": then}))["then tokens/s"] == 1.0 and made[0]() is None


def test_a_side_that_fails_is_named_and_takes_no_other_with_it() -> None:
    def fails() -> measured.Measured:
        raise MemoryError("too\nmuch")

    def refused() -> measured.Measured:
        raise UserError("it cannot\nrun here")

    def speed(tokens: float, loss: float) -> Callable[[], measured.Measured]:
        return lambda: measured.Measured([tokens], [1e12], loss)

    found = measured.Sides(CPU)
    plan = {"one": fails, "two": refused, "three": speed(3.0, 5.0), "HF": speed(2.0, 5.01), "HF b": speed(1.0, 6.0)}
    figures = dict(found.run(plan))
    assert figures["one tokens/s"] == "failed: too much" and figures["two tokens/s"] == "refused: it cannot run here"
    assert (figures["three tokens/s"], figures["three TFLOP/s"]) == (3.0, 1.0)
    assert dict(found.ratios("HF")) == {"three / HF": 1.5, "HF b / HF": 0.5}
    with pytest.raises(SystemExit, match=r"failed: one, HF b: loss 6$"):
        list(found.finish("three"))
    with pytest.raises(SystemExit, match=r"failed: one, two: not measured, HF b: loss 6$"):
        list(found.finish("two"))


def test_hf_has_its_grouped_products_in_bf16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, seen = torch.nn.functional.grouped_mm, set()

    def noted(rows: Any, weights: Any, **options: Any) -> Any:
        seen.add((rows.dtype, weights.dtype))
        return multiply(rows, weights, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    layer = loopback.experts_of_a_layer(CPU, torch.float32)
    hidden, index, weights = torch.randn(5, 64), torch.tensor([[0, 7]] * 5), torch.rand(5, 2)
    found = experts.grouped_mm_in_bf16(layer, hidden, index, weights)
    torch.testing.assert_close(found, layer(hidden, index, weights), rtol=0.05, atol=0.05)
    seen.discard((torch.float32, torch.float32))  # of ours
    assert seen == {(torch.bfloat16, torch.bfloat16)} and found.dtype == torch.float32
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("grouped", [True, False])
def test_hf_attends_within_samples_by_the_kernel_of_torch(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):  # type: ignore
        assert window_size == (-1, 0) and cu_q is cu_k and max_q == max_k == 5 and enable_gqa is grouped
        lengths = cu_q.diff().tolist()
        parts = (x.split(lengths) for x in (query, key, value))
        states = ([x.transpose(0, 1) for x in part] for part in zip(*parts, strict=True))
        attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
        return torch.cat([attend(*one).transpose(0, 1) for one in states])

    def of_torch_2_11(*rows, scale, window_size):  # type: ignore
        return exact(*rows, scale=scale, window_size=window_size)

    monkeypatch.setattr(sides.varlen, "varlen_attn", exact if grouped else of_torch_2_11)
    query, key, value = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
    out, _ = sides.varlen_of_torch(
        None, query, key, value, None, scaling=0.3, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=5
    )
    sample = torch.tensor([0] * 5 + [1] * 3)
    seen = (sample[:, None] == sample) & torch.ones(8, 8, dtype=torch.bool).tril()
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)


FIGURES = {  # of each phase, some that must be numbers on a CPU
    "machine": ("copy on the device GB/s", "wait for a value, us"),
    "right": ("attention sdpa causal 128 bfloat16", "gradients of mixed bfloat16", "quickstart bf16"),
    "races": (),
    "waits": ("mixed: all",),
    "dense": ("eager / HF", "eager recompute / HF"),
    "experts": ("loopback 8 / local", "HF grouped_mm / local"),
    "media": ("idle share",),
    "profile": ("step ms", "gaps above 50 us"),
}


@pytest.mark.slow
def test_a_tiny_day_is_green_on_a_cpu(tmp_path: Path) -> None:
    command = ["make", "gpu", f"ARGS=--tiny --output {tmp_path}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=False)
    found = read(tmp_path)
    assert {name: (phase.status, phase.said) for name, phase in found.phases.items()} == dict.fromkeys(
        FIGURES, (OK, [])
    )
    assert done.returncode == 0 and found.tiny and found.files.keys() == {"trace.json.gz"}
    for name, figures in FIGURES.items():
        assert all(isinstance(found.phases[name].figures[figure], float) for figure in figures)
    right = found.phases["right"].figures
    assert {name: value for name, value in right.items() if isinstance(value, float) and not value <= 1} == {}
    assert "needs cuda" in {right["attention varlen causal 64 bfloat16"], *found.phases["races"].figures.values()}
