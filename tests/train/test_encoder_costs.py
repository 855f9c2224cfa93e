"""`quadratic_cost: measured`: fitted in the first steps, and the same for all ranks from a fixed step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.item_costs import FROM_STEP, MEASURED_STEPS, WARM_UP
from omnitrain.plan.item_cost import Encoded
from omnitrain.recipe import Recipe
from omnitrain.train import encoder_costs
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_ranks import fit, metrics

FOUND = 0.5
ENCODER = "parallel.components.image_encoder"
MEASURED = [f"{ENCODER}.place=world", f"{ENCODER}.quadratic_cost=measured", "train.optimizer.schedule=constant"]


def costs_of_steps(recipe: Path, overrides: list[str], resume: bool) -> tuple[list[list[int]], list[Encoded]]:
    """A run in which the fit gives ``FOUND``: the costs of all items in each step, and what was measured."""
    trainer = Trainer(Recipe.load(str(recipe), overrides), resume=resume)
    inner, costs, measured = trainer.train_step, [], []

    def train_step(batch: Any) -> tuple[float, float]:
        costs.append(batch.plan.cost.tolist())
        return inner(batch)

    def fitted(rows: list[Encoded]) -> float:
        measured.extend(rows)
        return FOUND

    trainer.train_step = train_step
    with patch.object(encoder_costs, "fitted_quadratic", fitted):
        trainer.fit()
    return costs, measured


def test_costs_are_measured_once_and_a_resumed_run_plans_the_same(ranks: RankPool, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    short, long = ([*MEASURED, f"train.steps={steps}"] for steps in (FROM_STEP + 1, FROM_STEP + 3))
    (first, measured), (other, _) = ranks.run(costs_of_steps, recipe, short, False, timeout_s=120, world=2)
    assert first == other and len(measured) == 2 * (MEASURED_STEPS - WARM_UP)
    assert all(row.seconds > 0 and row.calls >= 1 for row in measured)
    linear = set().union(*first[:FROM_STEP])
    assert set(first[FROM_STEP]) <= {cost + round(FOUND * cost**2) for cost in linear} | linear
    assert max(first[FROM_STEP]) > max(linear)
    saved = tmp_path / "run" / "checkpoints" / f"step-{FROM_STEP + 1:08d}" / "trainer.pt"
    assert torch.load(saved, weights_only=True)["state"]["quadratic_costs"] == {"image_encoder": FOUND}
    kept = Recipe.load(str(tmp_path / "run" / "recipe.yaml")).parallel.components["image_encoder"]
    assert kept.quadratic_cost == FOUND
    (more, again), _ = ranks.run(costs_of_steps, recipe, long, True, timeout_s=120, world=2)
    assert again == [] and len(more) == 2 and all(max(costs) > max(linear) for costs in more)
    plain = [f"{ENCODER}.place=world", MEASURED[-1], long[-1], f"output_dir={tmp_path / 'plain'}"]
    ranks.run(fit, recipe, plain, timeout_s=120, world=2)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) > 1
