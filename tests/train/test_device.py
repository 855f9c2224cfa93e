from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from omnitrain.errors import UserError
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import ComponentPlan, ParallelPlan, Precision, Recipe, Train
from omnitrain.train.device import compute_dtype, mixed_precision, use_device
from omnitrain.train.metrics.console import console
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.parallel.factories import any_to_any
from tests.tiny import tiny_recipe


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two CUDA devices, as far as torch tells; the fixture's value lists those made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_each_rank_has_the_device_of_its_local_rank(
    asked: str, _two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert use_device(Train(device=asked)) == torch.device("cuda:1")
    assert _two_devices == [torch.device("cuda:1")]


def test_a_rank_that_sees_one_device_has_it_whatever_its_local_rank_is(
    _two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a task of Slurm with --gpus-per-task=1; the ranks compare their devices when they meet."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert use_device(Train()) == torch.device("cuda:0")
    assert use_device(Train(device="cpu")) == torch.device("cpu")


def test_a_check_counts_the_ranks_of_this_machine_where_a_run_has_several(
    _two_devices: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.load(str(tiny_recipe(tmp_path, text_only=True)), ["train.packs_per_step=4"])
    told = "this machine runs 4 ranks but has 2 CUDA devices"
    assert [problem[: len(told)] for problem in check_recipe(recipe, 4, one_machine=True)] == [told]
    with console.capture() as shown:
        assert check_recipe(recipe, 4) == []
    assert "note: 4 ranks need 2 machines with 2 CUDA devices each" in shown.get()
    assert "layout on 4 ranks (--nproc 4)" in shown.get()
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert check_recipe(recipe, 4) == []


def test_a_check_lists_what_ops_lack_whatever_the_device_is(tmp_path: Path) -> None:
    words = ["train.device=tpu", "model.ops.rms_norm=liger", "model.ops.attention=flash", "model.ops.experts=torch"]
    problems = check_recipe(Recipe.load(str(tiny_recipe(tmp_path, text_only=True)), words))
    starts = ["train.device: 'tpu' is not a device", *(f"{word.partition('=')[0]}: " for word in words[1:])]
    assert all(any(problem.startswith(start) for problem in problems) for start in starts), problems
    assert len(problems) == 4


def test_one_device_for_several_ranks_is_refused(
    _two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="'cuda:1' for 2 ranks"):
        use_device(Train(device="cuda:1"))


def test_a_process_alone_may_name_any_device(_two_devices: list[torch.device]) -> None:
    assert use_device(Train()) == torch.device("cuda") and _two_devices == []
    assert use_device(Train(device="cuda:1")) == torch.device("cuda:1")
    assert _two_devices == [torch.device("cuda:1")]  # kernels of triton are launched on the current one


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision(), torch.float32),
        (Precision(param="bfloat16"), torch.bfloat16),
        (Precision(compute="bfloat16"), torch.bfloat16),
        (Precision(param="bfloat16", compute="float32"), torch.float32),
    ],
)
def test_backends_are_asked_for_the_dtype_in_which_the_foundation_computes(
    precision: Precision, dtype: torch.dtype
) -> None:
    assert compute_dtype(ParallelPlan(default=ComponentPlan(precision=precision)), None) == dtype


@pytest.mark.parametrize(
    ("asked", "device_type", "mixed", "dtype"),
    [
        ("auto", "cuda", True, torch.bfloat16),
        ("auto", "cpu", None, torch.float32),
        ("bf16", "cpu", True, torch.bfloat16),
        ("fp32", "cuda", False, torch.float32),
    ],
)
def test_a_run_computes_in_bf16_on_cuda_and_in_fp32_on_cpu_unless_told_otherwise(
    asked: str, device_type: str, mixed: bool | None, dtype: torch.dtype
) -> None:
    found = mixed_precision(Train(precision=asked), device_type)
    assert found is mixed and compute_dtype(ParallelPlan(), found) == dtype


def test_a_component_computes_as_its_own_plan_says() -> None:
    """Beside `auto` on CUDA, and `bf16`; `fp32` contradicts a plan that says bf16."""
    own = ParallelPlan(components={"foundation": ComponentPlan(precision=Precision(compute="float32"))})
    assert compute_dtype(own, mixed_precision(Train(), "cuda")) == torch.float32
    with pytest.raises(UserError, match=r"found compute bfloat16, but .*`train.precision: fp32` in a recipe"):
        resolve_without_ranks(
            any_to_any(), ParallelPlan(default=ComponentPlan(precision=Precision(compute="bfloat16"))), False
        )


@pytest.mark.second
def test_a_process_alone_computes_in_bf16_where_it_is_told_to_and_says_so(tmp_path: Path) -> None:
    """On CPU; weights are fp32, losses those of fp32 up to rounding."""
    losses = {}
    for precision in ("fp32", "bf16"):
        overrides = [f"train.precision={precision}", f"output_dir={tmp_path / precision}", "train.steps=2"]
        trainer = Trainer(Recipe.load(str(tiny_recipe(tmp_path)), overrides))
        with console.capture() as printed:
            trainer.fit()
        leave_process_groups()
        lines = (tmp_path / precision / "metrics.jsonl").read_text().splitlines()
        losses[precision] = [json.loads(line)["loss"] for line in lines]
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        assert ("bfloat16" in printed.get()) == (precision == "bf16")
        assert ("computes in float32" in printed.get()) == (precision == "fp32")
    for low, full in zip(losses["bf16"], losses["fp32"], strict=True):
        assert 0 < abs(low / full - 1) < 0.03
