"""Runs with Muon: the same on ranks as in one process, experts included, and resumed under other layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from tests.stored import stored
from tests.tiny import tiny_moe_recipe

MUON = [
    "train.optimizer.kind=muon",
    "train.optimizer.learning_rate=1e-3",
    "train.optimizer.weight_decays={foundation: 0.1}",
]
EP = "parallel.components.foundation.ep=2"


def fit(recipe: Path, overrides: list[str], resume: bool = False) -> int:
    return Trainer(Recipe.load(str(recipe), [*MUON, *overrides]), resume=resume).fit().step


def weights(run: Path, step: int = 4) -> dict[str, torch.Tensor]:
    return OmniModel.from_pretrained(run / "checkpoints" / f"step-{step:08d}").state_dict()


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside it ``one``, a run of one process, with a checkpoint after two of its four steps."""
    path = tiny_moe_recipe(tmp_path_factory.mktemp("muon"))
    fit(path, [f"output_dir={path.parent / 'one'}", "train.save.every=2"])
    return path


def require_same(run: Path, reference: Path) -> None:
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    found, expected = weights(run), weights(reference)
    assert max(float((weight - expected[name]).abs().max()) for name, weight in found.items()) <= 1e-5
    before = weights(reference, 2)
    moved = {name: float((weight - before[name]).abs().max()) for name, weight in expected.items()}
    assert min(moved.values()) > 1e-4, min(moved, key=lambda name: moved[name])


@pytest.mark.parametrize(
    ("world", "overrides"), [(2, [EP]), pytest.param(4, ["train.packs_per_step=4", EP], marks=pytest.mark.slow)]
)
def test_muon_on_data_and_expert_parallel_ranks_is_muon_in_one_process(
    ranks: RankPool, recipe: Path, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    """Experts are matrices of three dims. The run goes on in one process, which reads the momentum of the ranks."""
    run, reference = tmp_path / "run", recipe.parent / "one"
    if world == 4:
        reference = tmp_path / "one"
        fit(recipe, [f"output_dir={reference}", "train.save.every=2", overrides[0]])
    arguments = [f"output_dir={run}", *overrides, "train.save.every=2"]
    assert ranks.run(fit, recipe, arguments, timeout_s=120, world=world) == world * [4]
    require_same(run, reference)
    state: dict[str, Any] = stored(run / "checkpoints" / "step-00000004" / "optimizer")
    of_experts = {name: tensor for name, tensor in state.items() if "experts" in name}
    assert of_experts and all(name.endswith(".momentum_buffer") and t.ndim == 3 for name, t in of_experts.items())
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert fit(recipe, [f"output_dir={run}", *overrides[:-1]], resume=True) == 4
    require_same(run, reference)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, []),
        pytest.param(2, ["parallel.default.mode=replicate"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.components.foundation.tp=2"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.components.foundation.tp=2", EP], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.components.foundation.pp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["parallel.default.memory.offload=[optimizer]"], marks=pytest.mark.slow),
    ],
)
def test_a_run_with_muon_goes_on_under_another_layout(
    ranks: RankPool, recipe: Path, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    shutil.copytree(recipe.parent / "one", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    arguments = [f"output_dir={tmp_path / 'run'}", "train.save.every=2", *overrides]
    assert ranks.run(fit, recipe, arguments, True, timeout_s=120, world=world) == world * [4]
    require_same(tmp_path / "run", recipe.parent / "one")
