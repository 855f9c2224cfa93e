"""Tensors of a checkpoint that its model does not have are told by place and number, hidden by transformers or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnitrain.models.hf.load import foundation_class, unused_line
from omnitrain.models.omni.build import build_foundation_model, build_omni_model, omni_config_at
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.console import console
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from omnitrain.train.verbs.export import export
from tests.families import FAMILIES
from tests.tiny import FOUNDATION, tiny_recipe, tiny_tokenizer


def saved_with(folder: Path, family: str, *names: str) -> str:
    """A tiny model of the family, whose file holds tensors of these names, too."""
    config = FAMILIES[family]()
    foundation_class(config)(config).save_pretrained(folder)
    return add(folder, *names)


def add(folder: Path, *names: str) -> str:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(2) for name in names}, file, {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("family", "names", "unused"),
    [
        ("qwen3_next", ("mtp.fc.weight", "mtp.layers.0.up.weight"), {"mtp.*": 2}),  # hidden by transformers
        ("glm4_moe", ("model.layers.46.eh_proj.weight", "model.layers.46.a.b"), {"model.layers.46.*": 2}),  # hidden
        (
            "deepseek_v3",
            ("model.layers.61.eh_proj.weight", "lm_head.scale"),
            {"lm_head.scale": 1, "model.layers.61.*": 1},
        ),
    ],
)
def test_tensors_of_multi_token_prediction_are_counted(
    family: str, names: tuple[str, ...], unused: dict[str, int], tmp_path: Path
) -> None:
    assert build_foundation_model(saved_with(tmp_path, family, *names)).unused_tensors == unused


def test_a_file_with_what_the_model_has_tells_nothing(tmp_path: Path) -> None:
    model = build_foundation_model(saved_with(tmp_path, "qwen3_next"))
    assert model.unused_tensors == {} and unused_line(model.unused_tensors) == ""


@pytest.mark.second
def test_check_run_and_export_tell_of_them_and_a_saved_model_remembers(tmp_path: Path) -> None:
    build_foundation_model(FOUNDATION).save_pretrained(tmp_path / "foundation")
    tiny_tokenizer().save_pretrained(tmp_path / "foundation")
    foundation = add(tmp_path / "foundation", "mtp.fc.weight", "mtp.norm.weight", "talker.head.weight")
    recipe = Recipe.load(str(tiny_recipe(tmp_path)), [f"model.foundation={foundation}", "train.steps=1"])
    line = (
        "the foundation's checkpoint holds 3 tensors that this model does not use: mtp.* (2), talker.* (1); they are "
        "not trained or saved; an export of the foundation alone copies them"
    )
    with console.capture() as checked:
        assert check_recipe(recipe) == []
    with console.capture() as trained:
        checkpoint = Trainer(recipe).fit().checkpoint
    said = export(checkpoint, tmp_path / "exported")
    assert said.endswith(
        "; left out 3 tensors of the foundation's checkpoint that this model does not use: mtp.* (2), talker.* (1)"
    )
    for printed in (checked, trained):
        assert " ".join(printed.get().split()).count(line) == 1
    assert omni_config_at(checkpoint).unused_tensors == {"mtp.*": 2, "talker.*": 1}
    assert build_omni_model(weights_path=checkpoint).config.unused_tensors == {"mtp.*": 2, "talker.*": 1}
