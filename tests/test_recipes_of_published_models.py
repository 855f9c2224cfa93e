"""Recipes of published models train with tiny copies of them, and name models of the published sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, ProcessorMixin

from omnitrain.data.render.native import NativeInputs
from omnitrain.models.hf.load import foundation_class
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_without_tokenizer
from tests.families import FAMILIES
from tests.tiny import tiny_row, tiny_tokenizer, write_parquet
from tests.tiny_processors import glm4v, internvl, qwen3_omni, qwen3_vl

SMALL = ["train.steps=2", "train.cpu_threads=1", "train.packs_per_step=2", "train.report=false", "parallel={}"]
SMALL += ["data.workers=0", "data.pack_tokens=200", "data.packing_buffer=4"]
PATCHES = {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32, "intermediate_size": None}


def named(*tokens: str) -> dict[str, int]:
    """The special tokens of a processor, in the order of its vocabulary: the first two are those of turns."""
    return {f"{token}_token_id": number for number, token in enumerate(tokens, start=2)}


def tiles() -> tuple[ProcessorMixin, NativeInputs]:
    """A processor of InternVL, whose tiles of four patches have one feature each."""
    made, inputs = internvl()
    made.image_seq_length = 1
    return made, inputs


QWEN = named("image", "video", "vision_start", "vision_end")
OMNI = named("image", "video", "audio", "vision_start", "vision_end", "audio_start", "audio_end")
GLM = {"image_token_id": 3, "video_token_id": 4, "image_start_token_id": 5, "image_end_token_id": 6}
GLM |= {"video_start_token_id": 7, "video_end_token_id": 8}
# Recipe -> the tiny model's type, its values beside those of a family of the suite, and its processor.
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], tuple[ProcessorMixin, NativeInputs]]]] = {
    "qwen3_5": ("qwen3_5", "qwen3_5", QWEN, qwen3_vl),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5", QWEN, qwen3_vl),
    "qwen3_omni": ("qwen3_omni_moe_thinker", "qwen3_omni_moe_thinker", OMNI, qwen3_omni),
    "glm_4_6v": ("glm4v", "glm4v", GLM, glm4v),
    "internvl": ("internvl", "internvl", {"image_token_id": 4, "image_seq_length": 1}, tiles),
}


def tiny_config(name: str) -> PreTrainedConfig:
    model_type, family, tokens, _ = MODELS[name]
    values = FAMILIES[family]().to_dict() | tokens | {"model_type": model_type}
    values["text_config"]["vocab_size"] = 270
    if name == "qwen3_5_moe":
        values["text_config"] |= EXPERTS | {"model_type": "qwen3_5_moe_text"}
        values["vision_config"]["model_type"] = "qwen3_5_moe_vision"
    values["vision_config"] |= {"image_size": [8, 8]} if name == "internvl" else PATCHES
    return AutoConfig.for_model(**values)


def trained_parts(recipe: Recipe) -> set[str]:
    """The components whose weights a run of two steps moves."""
    trainer = Trainer(recipe)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    assert trainer.fit().step == 2
    return {
        component
        for component, parameters in trainer.model.components.items()
        if any(not torch.equal(value, before[name]) for name, value in parameters.items())
    }


@pytest.mark.parametrize(
    "name", [*MODELS][:1] + [pytest.param(name, marks=pytest.mark.second) for name in [*MODELS][1:]]
)
def test_a_published_model_is_fine_tuned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, config = MODELS[name][3]()[0], tiny_config(name)
    monkeypatch.setattr("omnitrain.data.chat.text_tokenizer.AutoProcessor.from_pretrained", lambda path: made)
    monkeypatch.setattr(type(made), "save_pretrained", lambda self, folder: self.tokenizer.save_pretrained(folder))
    torch.manual_seed(0)
    foundation_class(config)(config).save_pretrained(tmp_path / "model")
    rows = write_parquet(tmp_path / "rows.parquet", [tiny_row("image_to_text", index) for index in range(8)])
    own = [f"model.foundation={tmp_path / 'model'}", f"data.train=[{{path: {rows}}}]", "data.processor_arguments={}"]
    recipe = Recipe.load(name, [*SMALL, *own, f"output_dir={tmp_path / 'run'}"])
    frozen = {part for part in recipe.model.freeze if part.endswith("_encoder")}
    assert trained_parts(recipe) == {"foundation", "image_encoder"} - frozen


def test_deepseek_is_pretrained_from_random_weights(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "page.txt").write_text("Every page of the corpus is a text. " * 40)
    config = FAMILIES["deepseek_v3"]().to_diff_dict() | {"vocab_size": 264}
    source = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    own = [f"model.foundation={json.dumps({'config': source})}", f"model.tokenizer={tmp_path / 'words'}"]
    own += [f"data.train=[{{path: {tmp_path / 'page.txt'}}}]", f"output_dir={tmp_path / 'run'}"]
    assert trained_parts(Recipe.load("deepseek_v3", [*SMALL, *own])) == {"foundation"}


# Recipe -> part -> parameters. The sizes are the defaults of transformers' config classes, which are those of the
# checkpoints that their docstrings name (35B is 35.1B, GLM-4.6V-Flash is listed with 10B); of DeepSeek-V3, those of the
# recipe. Parts: the tower with its merger, the language model with its head.
SIZES = {
    "qwen3_5": {"language model": 8953803264, "tower": 453650672},
    "qwen3_5_moe": {"language model": 34660610688, "tower": 453650672},
    "glm_4_6v": {"language model": 9400279040, "tower": 892498432},
    "deepseek_v3": {"language model": 671026404352},
}


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_names_a_model_of_the_published_size(name: str) -> None:
    source = Recipe.load(name).model.foundation
    values = {"model_type": "glm4v" if name == "glm_4_6v" else name} | (source.config or {})
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = foundation_class(config)(config)
    sizes = Counter()
    for path, parameter in model.named_parameters():
        sizes["tower" if ".visual." in path else "language model"] += parameter.numel()
    assert sizes == SIZES[name]


@pytest.mark.second
def test_the_layout_on_1024_ranks_is_one_that_the_model_allows(capsys: pytest.CaptureFixture[str]) -> None:
    widths = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4}
    widths |= {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    widths |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "vocab_size": 512}
    narrow = [f"model.foundation.config.{key}={value}" for key, value in widths.items()]
    assert check_without_tokenizer(Recipe.load("deepseek_v3", narrow), 1024) == []
    assert "layout on 1024 ranks" in capsys.readouterr().out
