"""The example of docs/recipes.md: an encoder class of the user's own, from a plugin."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from omnitrain.models.omni.build import build_omni_model
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.tiny import FOUNDATION, tiny_processor, tiny_recipe, tiny_row, write_parquet

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def test_the_documented_plugin_trains_from_a_recipe_in_data_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = re.search(r"```python\n# colors\.py\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    # A class is registered once in a process, and the blocks of the page may have run before.
    plugin = Path(getattr(sys.modules.get("colors"), "__file__", None) or tmp_path / "colors.py")
    plugin.write_text(code[1])
    path = tiny_recipe(tmp_path, steps=2)
    write_parquet(tmp_path / "train.parquet", [tiny_row("image_to_text", i) for i in range(20)])
    parts = ["model.foundation=null", "model.tokenizer=null", "model.encoders={}", "model.decoders={}"]
    changes = [*parts, f"model.checkpoint={tmp_path / 'model'}", f"plugins=[{plugin}]"]
    recipe = Recipe.load(str(path), [*changes, "data.workers=1"])
    colors = sys.modules["colors"]
    encoder = colors.ColorEncoder(colors.ColorConfig(hidden_size=FOUNDATION["hidden_size"]))
    model = build_omni_model(foundation=FOUNDATION, encoders={"image_encoder": encoder})
    model.save_pretrained(tmp_path / "model")
    tiny_processor(model).save_pretrained(tmp_path / "model")
    assert check_recipe(recipe) == []
    assert Trainer(recipe).fit().step == 2
    assert Trainer(Recipe.load(str(tmp_path / "run" / "recipe.yaml"), ["train.steps=3"]), resume=True).fit().step == 3
