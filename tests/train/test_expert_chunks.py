"""`expert_chunks: auto`: measured in the first steps, and from then on a number of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_moe_recipe
from tests.train.test_ranks import fit, metrics

MEASURED = 1 + 3 * 3  # a step to warm up, and three of each of 1, 2, 4: a rank has four experts
AUTO = ["parallel.default.ep=2", "parallel.default.experts.chunks=auto", "data.pack_tokens=48", "train.save.every=8"]
SAME_RATE = "train.optimizer.schedule=constant"  # however many steps there are


def chunks_of_steps(recipe: Path, overrides: Sequence[str], resume: bool) -> list[set[int]]:
    """A run; the numbers of chunks of all layers in each of its steps."""
    trainer = Trainer(Recipe.load(str(recipe), list(overrides)), resume=resume)
    inner, seen = trainer.train_step, []

    def train_step(batch: Any) -> tuple[float, float]:
        seen.append({dispatcher.chunks for dispatcher in trainer.measures.chunks._dispatchers["foundation"]})
        return inner(batch)

    trainer.train_step = train_step
    trainer.fit()
    return seen


def kept(run: Path, step: int) -> tuple[Any, Any]:
    """What recipe and checkpoint of a run say."""
    state = torch.load(run / "checkpoints" / f"step-{step:08d}" / "trainer.pt", weights_only=True)["state"]
    return Recipe.load(str(run / "recipe.yaml")).parallel.of("foundation").experts.chunks, state["expert_chunks"]


@pytest.mark.second
def test_the_number_of_chunks_is_measured_once_and_changes_no_loss(ranks: RankPool, tmp_path: Path) -> None:
    recipe, run = tiny_moe_recipe(tmp_path), tmp_path / "run"
    less, more = ([*AUTO, SAME_RATE, f"train.steps={steps}"] for steps in (MEASURED + 1, MEASURED + 3))
    seen, _ = ranks.run(chunks_of_steps, recipe, less, False, timeout_s=60, world=2)
    assert seen[:MEASURED] == [{1}, *3 * [{1}, {2}, {4}]]
    found, in_checkpoint = kept(run, MEASURED + 1)
    assert seen[MEASURED:] == [{found}] and in_checkpoint == {"foundation": found}
    assert kept(run, 8)[1] is None  # it was saved while measuring
    seen, _ = ranks.run(chunks_of_steps, recipe, more, True, timeout_s=60, world=2)
    assert seen == [{found}, {found}] and kept(run, MEASURED + 3) == (found, in_checkpoint)
    fixed = [*more, "parallel.default.experts.chunks=2", f"output_dir={tmp_path / 'fixed'}"]
    ranks.run(fit, recipe, fixed, timeout_s=60, world=2)
    columns = [[(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name)] for name in ("run", "fixed")]
    assert columns[0] == columns[1] and len(columns[0]) == MEASURED + 3
