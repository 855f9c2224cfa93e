from __future__ import annotations

from pathlib import Path

from omnitrain.parallel.ranks import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.verify import verify_recipe
from tests.tiny import tiny_recipe


def test_a_recipe_is_verified_on_its_own_model_and_data(tmp_path: Path, ranks: RankPool) -> None:
    report = verify_recipe(Recipe.load(str(tiny_recipe(tmp_path))), ["dp2.accum2"], nproc=2, num_samples=7, pool=ranks)
    (row,) = report.rows
    assert row.status == "equal" and report.ok, row.reason
    assert row.loss_error < 1e-6 and row.collectives > 0
