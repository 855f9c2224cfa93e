"""A checkpoint whose config ties the head, and whose files have a head of its own, as a merge of adapters leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import omnitrain as ot
from omnitrain.errors import WeightsError
from omnitrain.models.hf.load import OWN_HEAD, foundation_class
from omnitrain.recipe import Model
from omnitrain.recipe.component_configs import OmniConfig
from omnitrain.train.metrics.display import show_own_head
from omnitrain.train.verbs.check import weights_problems
from omnitrain.train.verbs.export import export
from tests.families import FAMILIES
from tests.tiny import tiny_model, tiny_processor

HEAD = "lm_head.weight"


def slow(*families: str) -> list[Any]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


def saved(folder: Path, family: str = "qwen3", *, equal: bool = False, **text: Any) -> PreTrainedModel:
    """A checkpoint with both tensors, whose config ties them at the top, or in its ``text_config`` with ``text``."""
    config = FAMILIES[family]()
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = False
    model = foundation_class(config)(config).eval()
    if equal:
        model.get_output_embeddings().weight.data = model.get_input_embeddings().weight.data.clone()
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    if text:
        values["text_config"] |= text
        del values["tie_word_embeddings"]
    else:
        values["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(values))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(10, 40)[None]).logits


@pytest.mark.parametrize("family", ["qwen3", "llava in text_config", *slow("llava", "qwen3_vl")])
def test_the_head_of_the_files_is_loaded_untied_and_stays_so_in_what_is_saved(family: str, tmp_path: Path) -> None:
    """llava reads the flag of its text_config where the top has none."""
    family, _, flag = family.partition(" in ")
    plain = saved(tmp_path / "source", family, **({"tie_word_embeddings": True} if flag else {}))
    assert AutoConfig.from_pretrained(tmp_path / "source").tie_word_embeddings
    model = ot.build_omni_model(foundation=str(tmp_path / "source"), torch_dtype=torch.float32)
    assert torch.equal(logits(model.foundation), logits(plain))
    assert model.config.has_own_head and model.foundation.get_output_embeddings().weight.requires_grad
    model.save_pretrained(tmp_path / "omni")
    again = ot.build_omni_model(weights_path=tmp_path / "omni")
    assert torch.equal(logits(again.foundation), logits(plain)) and again.config.has_own_head
    again.foundation.save_pretrained(tmp_path / "hf")
    auto = AutoModelForCausalLM if family == "qwen3" else AutoModelForImageTextToText
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "hf")), logits(plain))


@pytest.mark.parametrize("family", ["qwen3", *slow("llava")])
def test_an_export_with_the_files_of_its_source_says_that_it_is_not_tied(family: str, tmp_path: Path) -> None:
    """The two may become equal by training, or be cast to equal values."""
    saved(tmp_path / "source", family)
    model = ot.build_omni_model(foundation=str(tmp_path / "source"), torch_dtype=torch.float32)
    with torch.no_grad():
        model.foundation.get_output_embeddings().weight.copy_(model.foundation.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "run")
    tiny_processor(tiny_model()).save_pretrained(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "plain")
    config = AutoConfig.from_pretrained(tmp_path / "plain")
    assert not config.tie_word_embeddings and not config.get_text_config(decoder=True).tie_word_embeddings
    again = foundation_class(config).from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again), logits(model.foundation))
    assert again.get_output_embeddings().weight is not again.get_input_embeddings().weight


def test_every_rank_finds_the_same_model_with_or_without_weights(tmp_path: Path) -> None:
    saved(tmp_path / "source")
    whole, shapes = (ot.build_omni_model(foundation=tmp_path / "source", init_device=on) for on in ("cpu", "meta"))
    assert [n for n, _ in whole.named_parameters()] == [n for n, _ in shapes.named_parameters()]
    assert f"foundation.{HEAD}" in dict(shapes.named_parameters()) and shapes.config.has_own_head
    assert ot.build_omni_model(foundation=ot.build_foundation_model(tmp_path / "source")).config.has_own_head
    assert weights_problems(Model(foundation={"path": str(tmp_path / "source")})) == []


def test_equal_copies_stay_tied(tmp_path: Path) -> None:
    plain = saved(tmp_path / "source", equal=True)
    model = ot.build_omni_model(foundation=str(tmp_path / "source"), torch_dtype=torch.float32)
    assert f"foundation.{HEAD}" not in dict(model.named_parameters()) and not model.config.has_own_head
    assert model.foundation.config.tie_word_embeddings and torch.equal(logits(model.foundation), logits(plain))


def test_files_that_cannot_be_compared_before_loading_are_refused_in_words(tmp_path: Path) -> None:
    saved(tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    torch.save(weights, tmp_path / "source" / "pytorch_model.bin")
    (tmp_path / "source" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"ties lm_head\.weight to other weights.*set `tie_word_embeddings: false`"):
        ot.build_omni_model(foundation=str(tmp_path / "source"))
    save_file(weights | {f"old.{HEAD}": weights[HEAD].clone()}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"ties lm_head\.weight to other weights"):  # two could be the head
        ot.build_omni_model(foundation=str(tmp_path / "source"))


def test_a_run_says_so_at_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    show_own_head(OmniConfig(has_own_head=True))
    assert " ".join(capsys.readouterr().out.split()) == OWN_HEAD
    show_own_head(OmniConfig())
    assert capsys.readouterr().out == ""
