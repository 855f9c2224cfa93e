"""Runs that deal packs to ranks by cost are the runs that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from tests.tiny import TASKS, tiny_recipe
from tests.train.test_ranks import assert_same_run, fit

STEP = [
    "train.optimizer.schedule=constant",
    "train.packs_per_step=4",
    "data.pack_tokens=96",
    "evaluation=null",
    "data.workers=1",
]
DEALT = ["parallel.components.foundation.place=world", "parallel.components.foundation.quadratic_cost=0.05"]


@pytest.mark.slow
def test_a_run_that_deals_packs_resumes_on_other_ranks_with_the_steps_of_one_process(
    ranks: RankPool, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, rows=2 * len(TASKS))
    fit(recipe, [*STEP, f"output_dir={tmp_path / 'one'}", "train.steps=5"])
    run = [*STEP, f"output_dir={tmp_path / 'dealt'}"]
    ranks.run(fit, recipe, [*run, *DEALT, "train.steps=2"], timeout_s=120, world=2)
    ranks.run(fit, recipe, [*run, *DEALT, "train.steps=4"], True, timeout_s=120, world=3)
    fit(recipe, [*run, "train.steps=5"], resume=True)
    assert_same_run(tmp_path / "dealt", tmp_path / "one")
