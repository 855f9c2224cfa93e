import os
from pathlib import Path

import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe, list_recipes, save_recipe


def refusal(*arguments: object) -> list[str]:
    with pytest.raises(RecipeError) as error:
        Recipe.load(*arguments)
    return str(error.value).splitlines()


def test_saved_recipe_is_complete_and_loads_to_an_equal_tree(recipe_file: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(recipe_file, ["data.chat.end='1e-3'", "output_dir='1e5'", 'data.chat.separator="\\n\\t"'])
    saved = tmp_path / "run" / "recipe.yaml"
    save_recipe(recipe, saved)
    assert Recipe.load(saved) == recipe
    assert "weight_decay: 0.01" in saved.read_text()
    assert os.listdir(saved.parent) == ["recipe.yaml"]


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipe_saves_and_loads_to_an_equal_tree(name: str, tmp_path: Path) -> None:
    recipe = Recipe.load(name)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe
    assert len(list_recipes()[name].read_text().splitlines()) < 60


def test_all_problems_are_reported_at_once_one_line_each(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "model: {foundation: {config: {model_type: qwen3, hiden_size: 8, vocab_size: many}}}\n"
        "data: {tran: [{path: x}], pack_tokens: many}\n"
        "train: {optimizer: {learning_rat: 1e-3, schedule: cosin}}\n"
        "evaluation: {saved_samples: -1}\n"
    )
    assert refusal(file, ["train.steps", "data.heldout.2.path=x"]) == [
        f"8 problems in {file}:",
        "  override `train.steps`: expected key.sub=value, such as train.steps=20",
        "  data.heldout.2: found `2`; expected no index, the list is empty; or set `data.heldout` as a whole",
        "  model.foundation.config.hiden_size: unknown key of Qwen3Config, found 8; did you mean `hidden_size`?",
        "  data.pack_tokens: found 'many'; expected an integer, unable to parse string as an integer; "
        "change it, or remove it for the default 4096",
        "  data.tran: unknown key, found [{'path': 'x'}]; did you mean `train`?",
        "  train.optimizer.schedule: found 'cosin'; expected 'cosine', 'linear' or 'constant'; did you mean `cosine`?",
        "  train.optimizer.learning_rat: unknown key, found 0.001; did you mean `learning_rate`?",
        "  evaluation.saved_samples: found -1; expected greater than or equal to 0; "
        "change it, or remove it for the default 4",
    ]


def test_missing_key_is_named_with_what_it_means(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("data: {train: [{weight: 1}]}")
    assert refusal(file)[1:] == [
        "  model: required, but missing; add `model`: The omni model",
        "  data.train.0.path: required, but missing; add `path`: Files of data (parquet, Arrow, JSON Lines, JSON, "
        "csv, tar shards or text), as a path, a URL, a glob, a range `{00..12}` or a folder; or a Hub data set id",
    ]


def test_branches_of_a_union_make_one_line(recipe_file: Path) -> None:
    assert refusal(recipe_file, ["model.encoders.image_encoder.processor=[3]"])[1:] == [
        "  model.encoders.image_encoder.processor: found [3]; expected a string, or a dictionary; "
        "change it, or remove it",
    ]
    assert refusal(recipe_file, ["parallel.default.experts.chunks=atuo"])[1:] == [
        "  parallel.default.experts.chunks: found 'atuo'; expected an integer, unable to parse string as an "
        "integer, or 'auto'; did you mean `auto`?",
    ]


def test_sampling_of_something_the_model_does_not_write_is_refused(recipe_file: Path) -> None:
    assert refusal(recipe_file, ["evaluation.sampling.image_decodr.temperature=2"])[1:] == [
        "  evaluation.sampling.image_decodr: unknown name; did you mean `image_decoder`?",
    ]


def test_missing_file_says_what_was_looked_for_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnitrain.recipe.tree._PACKAGE", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert refusal("recipes/quickstrat.yaml") == [
        f"no recipe `recipes/quickstrat.yaml`: looked for the file {tmp_path}/recipes/quickstrat.yaml and for a "
        f"shipped recipe with that name in {tmp_path}/recipes; did you mean `recipes/quickstart.yaml`?"
    ]


def test_file_that_is_no_mapping_or_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("# nothing\n")
    assert "found an empty file" in refusal(file)[0]
    file.write_text("- a\n")
    assert "found a list" in refusal(file)[0]
    file.write_bytes(b"a: \xff")
    assert "not UTF-8 text (byte 3)" in refusal(file)[0]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "model.foundation.path=x",
            "  model.foundation: give exactly one of `path` (pretrained weights) and `config` (random weights), "
            "found both",
        ),
        (
            "model.checkpoint=x",
            "  model: `checkpoint` already contains the whole model; "
            "remove ['foundation', 'tokenizer', 'encoders', 'decoders']",
        ),
        (
            "model={encoders: {}}",
            "  model: give `checkpoint` (a saved omni model) or `foundation` (a language model)",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_one_line_at_their_node(recipe_file: Path, override: str, line: str) -> None:
    assert refusal(recipe_file, [override])[1:] == [line]


def test_numbers_are_finite(recipe_file: Path) -> None:
    lines = refusal(recipe_file, ["train.optimizer.learning_rates={foundation: .inf}"])[1:]
    assert lines == ["  train.optimizer.learning_rates.foundation: found inf; expected a finite number; change it"]


def test_one_value_in_the_place_of_a_list_is_a_list_of_one(recipe_file: Path) -> None:
    ones = ["train.track.to=wandb", "model.freeze=foundation", "data.train={path: rows.jsonl, media_markers: image}"]
    selective = ["parallel.default.memory.recompute.keep=aten.mm", "parallel.default.memory.offload=optimizer"]
    recipe = Recipe.load(recipe_file, [*ones, *selective])
    assert recipe.train.track.to == ["wandb"] and recipe.model.freeze == ["foundation"]
    assert [source.path for source in recipe.data.train] == ["rows.jsonl"]
    assert recipe.data.train[0].media_markers == ["image"]
    memory = recipe.parallel.default.memory
    assert (memory.kept_ops, memory.mode, memory.offload) == (["aten.mm"], "selective", ["optimizer"])
    recipe.train.callbacks = "hooks.py:Stop"  # type: ignore[assignment]
    assert recipe.train.callbacks == ["hooks.py:Stop"]
    with pytest.raises(RecipeError, match=r"data\.train\.0: found 'rows\.jsonl'; expected a mapping"):
        Recipe.load(recipe_file, ["data.train=rows.jsonl"])
    with pytest.raises(RecipeError, match=r"train\.track\.to: found None; expected a list"):
        Recipe.load(recipe_file, ["train.track.to=null"])


def test_overrides_are_a_list(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"overrides: found a str; expected a list of key\.sub=value"):
        Recipe.load(recipe_file, "train.steps=3")  # type: ignore[arg-type]


def test_a_shipped_recipe_finds_its_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("quickstart")
    data, scorer = recipe.data.train[0].path, recipe.evaluation.scorer
    assert Path(data).is_file() and Path(scorer.rpartition(":")[0]).is_file()
    (tmp_path / "tasks" / "quickstart" / "data").mkdir(parents=True)
    (tmp_path / "tasks" / "quickstart" / "data" / "train.parquet").touch()
    assert Recipe.load("quickstart").data.train[0].path == "tasks/quickstart/data/train.parquet"
