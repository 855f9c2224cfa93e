"""Recipes that write the experts of their tokens, and ones that take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from tests.tiny import FOUNDATION, tiny_recipe

PLAIN = {name: value for name, value in FOUNDATION.items() if name != "head_dim"}
EXPERTS = PLAIN | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def lines_of(recipe: Path, run: str, *overrides: str) -> list[dict]:
    """Metrics of a run."""
    folder = recipe.parent / run
    Trainer(Recipe.load(str(recipe), [f"output_dir={folder}", *overrides])).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.second
def test_a_run_takes_the_experts_of_another_and_counts_where_it_would_not_have(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, steps=2)
    tree = yaml.safe_load(recipe.read_text())
    tree["model"]["foundation"]["config"] = EXPERTS
    recipe.write_text(yaml.safe_dump(tree))
    routing = tmp_path / "routing"
    recorded = lines_of(recipe, "recorded", f"train.experts.record={routing}")
    assert len(list(routing.iterdir())) == 2 and "replay" not in recorded[0]
    again, other = (
        lines_of(recipe, name, f"train.experts.replay={routing}", *overrides)
        for name, overrides in (("again", []), ("other", ["train.optimizer.learning_rate=0.3"]))
    )
    assert [line["loss"] for line in again] == [line["loss"] for line in recorded]
    assert [line["replay"] for line in again] == 2 * [{"near_ties": 0, "others": 0}]
    assert other[0]["replay"] == again[0]["replay"] and other[1]["replay"]["others"] > 0
    with pytest.raises(UserError, match="`record` and `replay` exclude each other"):
        lines_of(recipe, "both", f"train.experts.replay={routing}", f"train.experts.record={routing}")
