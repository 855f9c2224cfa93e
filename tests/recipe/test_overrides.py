from pathlib import Path

import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe
from omnitrain.recipe.tree import apply_overrides


def test_values_are_yaml_and_reach_every_kind_of_node(recipe_file: Path) -> None:
    recipe = Recipe.load(
        recipe_file,
        [
            "train.steps=20",
            "train.optimizer.learning_rate=2e-4",
            "train.optimizer.max_grad_norm=null",
            "data.train.0.path=other.parquet",
            "model.foundation.config.num_hidden_layers=3",
            "model.encoders.second={tower: some/tower}",
            "model.encoders.third.tower.path=other/tower",
            "evaluation.sampling.text.top_p=0.9",
        ],
    )
    assert recipe.train.steps == 20
    assert recipe.train.optimizer.learning_rate == 2e-4
    assert recipe.train.optimizer.max_grad_norm is None
    assert recipe.data.train[0].path == "other.parquet"
    assert recipe.model.foundation is not None
    assert recipe.model.foundation.config is not None
    assert recipe.model.foundation.config["num_hidden_layers"] == 3
    assert recipe.model.encoders["second"].tower.path == "some/tower"
    assert recipe.model.encoders["third"].tower.path == "other/tower"
    assert recipe.evaluation is not None
    assert recipe.evaluation.sampling["text"].top_p == 0.9


def test_a_null_node_becomes_a_group() -> None:
    tree = {"evaluation": None}
    assert apply_overrides(tree, ["evaluation.batch_size=3", "a.b.c=x"]) == []
    assert tree == {"evaluation": {"batch_size": 3}, "a": {"b": {"c": "x"}}}


def test_the_first_index_makes_a_list_that_nobody_wrote(recipe_file: Path) -> None:
    tree = {"data": {"heldout": None}}
    assert apply_overrides(tree, ["data.heldout.0.path=x", "model.freeze.0=foundation"]) == []
    assert tree == {"data": {"heldout": [{"path": "x"}]}, "model": {"freeze": ["foundation"]}}
    with pytest.raises(RecipeError, match=r"data.trian: unknown key, found .*; did you mean `train`"):
        Recipe.load(recipe_file, ["data.trian.0.path=x"])


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.steps", "override `train.steps`: expected key.sub=value, such as train.steps=20"),
        ("=3", "override `=3`: expected key.sub=value, such as train.steps=20"),
        ("train..steps=3", "override `train..steps=3`: expected key.sub=value, such as train.steps=20"),
        (
            "data.train.1.path=x",
            "data.train.1: found `1`; expected an index from 0 to 0; or set `data.train` as a whole",
        ),
        (
            "data.train.path=x",
            "data.train.path: found `path`; expected an index from 0 to 0; or set `data.train` as a whole",
        ),
        ("train.steps.x=3", "train.steps.x: `train.steps` is 10, which has no keys; set `train.steps` as a whole"),
        ("train.stps=3", "train.stps: unknown key, found 3; did you mean `steps`?"),
        ("train.steps=[", "override `train.steps=[`:1:2: not valid YAML: "),
    ],
)
def test_bad_override_is_one_clear_line(recipe_file: Path, override: str, problem: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.load(recipe_file, [override])
    header, line = str(error.value).splitlines()
    assert header == f"1 problem in {recipe_file}:"
    assert line.startswith(f"  {problem}")
