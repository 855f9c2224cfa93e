"""From a recipe to steps, of a model whose own forward alone reads sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import build_from_recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.answer import Answerer
from omnitrain.train.verbs.check import check_recipe
from tests.in_forward import FAMILIES
from tests.tiny import TASKS, tiny_row, wav, write_parquet


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Qwen2-Audio with its processor in a folder, and rows of text and of speech."""
    make, processor = FAMILIES["qwen2_audio"]
    make().save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    tasks = [TASKS[0], "speech_to_text"]
    data = write_parquet(tmp_path / "rows.parquet", [tiny_row(tasks[i % 2], i) for i in range(8)])
    tree = {
        "output_dir": str(tmp_path / "run"),
        "model": {"foundation": str(tmp_path / "model")},
        "data": {"train": [{"path": str(data)}], "pack_tokens": 400, "packing_buffer": 4, "workers": 0},
        "train": {"steps": 3, "cpu_threads": 1, "log_every": 1, "optimizer": {"warmup_steps": 1}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.second
def test_a_recipe_checks_trains_and_answers(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = Recipe.load(str(recipe))
    assert check_recipe(loaded) == []
    assert "read by the model's own forward" in " ".join(capsys.readouterr().out.split())
    trainer = Trainer(loaded)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.fit()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert before.keys() - moved == {"foundation.model.audio_tower.embed_positions.weight"}
    losses = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    sound = recipe.parent / "sound.wav"
    sound.write_bytes(wav(0, 0.5))
    answerer = Answerer(recipe.parent / "run", output_dir=recipe.parent, max_new_tokens=3)
    made, _ = answerer.answer("say", {"audio": [str(sound)]})
    assert 1 <= len(made.tokens) <= 3


def test_rows_that_ranks_share_cannot_hold_such_media_and_text_is_trained(recipe: Path) -> None:
    loaded = Recipe.load(str(recipe), ["parallel.default.ulysses=2"])
    _, processor = build_from_recipe(loaded, init_device="meta")
    assert len(processor.sample(tiny_row("text", 0))) > 0
    with pytest.raises(UserError, match="the foundation cannot read it: its own forward needs whole sequences"):
        processor.sample(tiny_row("speech_to_text", 1))


def test_without_its_processor_text_is_trained_and_sound_refused(recipe: Path) -> None:
    folder = recipe.parent / "model"
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "NoSuchProcessor"}))
    _, processor = build_from_recipe(Recipe.load(str(recipe)), init_device="meta")
    assert len(processor.sample(tiny_row("text", 0))) > 0
    with pytest.raises(UserError, match="the foundation cannot read it: "):
        processor.sample(tiny_row("speech_to_text", 1))
