"""A whole HF multimodal model as the foundation of a recipe, from its folder to its answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.models.omni.summary import component_rows
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import build_from_recipe, load_checkpoint
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_row, write_parquet
from tests.tiny_processors import llava

TASKS = ("text", "image_to_text", "images_to_text")
TEXT = {"model_type": "llama", "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
VISION = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def save_llava(folder: Path) -> None:
    """A small one from random weights, with its processor."""
    text = TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2}
    vision = VISION | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = AutoConfig.for_model(
        "llava", text_config=text, vision_config=vision, image_token_index=2, image_seq_length=4
    )
    torch.manual_seed(0)
    foundation_class(config)(config).save_pretrained(folder)
    llava()[0].save_pretrained(folder)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """LLaVA with its processor in a folder, and rows of text, one image and two."""
    folder = tmp_path / "llava"
    save_llava(folder)
    data = write_parquet(tmp_path / "rows.parquet", [tiny_row(TASKS[i % 3], i) for i in range(12)])
    tree = {
        "output_dir": str(tmp_path / "run"),
        "model": {"foundation": str(folder)},
        "data": {"train": [{"path": str(data)}], "pack_tokens": 200, "packing_buffer": 4, "workers": 0},
        "train": {"steps": 3, "cpu_threads": 1, "log_every": 1, "optimizer": {"warmup_steps": 1}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return Recipe.load(str(path))


@pytest.mark.second
def test_a_recipe_trains_a_whole_hf_model_by_its_own_processor(recipe: Recipe) -> None:
    recipe.model.freeze = ["image_encoder"]
    trainer = Trainer(recipe)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.fit()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"foundation.{name}" for name in trainer.model.runner.native.components["foundation"]}
    model, processor = load_checkpoint(recipe.output_dir)
    sample = processor.sample(tiny_row("images_to_text", 1))
    assert [span.component for span in sample.spans] == ["foundation.image"] * 2
    assert model.state_dict().keys() == trainer.model.state_dict().keys()


def test_components_by_touch_are_in_the_table_and_can_be_frozen_by_name(recipe: Recipe) -> None:
    model, _ = build_from_recipe(recipe)
    rows = {row.name: row for row in component_rows(model)}
    assert rows["image_encoder"].class_name == "model.multi_modal_projector, model.vision_tower"
    assert rows["foundation"].parameters + rows["image_encoder"].parameters == sum(
        p.numel() for p in model.parameters()
    )
    freeze(model, ["foundation", "foundation.model.multi_modal_projector.linear_1.bias"])
    trained = {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"vision_tower", "multi_modal_projector"}
    frozen = {row.name: row.parameters - row.trainable for row in component_rows(model)}
    assert frozen == {"foundation": rows["foundation"].parameters, "image_encoder": 32}


def test_training_from_a_checkpoint_saved_in_bf16_has_fp32_weights(recipe: Recipe, tmp_path: Path) -> None:
    _, processor = build_from_recipe(recipe)
    foundation = str(tmp_path / "llava")
    build_omni_model(foundation=foundation, torch_dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    processor.save_pretrained(tmp_path / "half")
    half = Recipe.load(str(tmp_path / "recipe.yaml"), ["model={checkpoint: " + str(tmp_path / "half") + "}"])
    assert {p.dtype for p in build_from_recipe(half)[0].parameters()} == {torch.float32}
    assert {p.dtype for p in load_checkpoint(tmp_path / "half")[0].parameters()} == {torch.bfloat16}
