"""What omnitrain exports, plain transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import omnitrain as ot
from omnitrain.errors import UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.verbs.export import export
from tests.parallel.factories import deepseek_v3, qwen3_moe_with_adapters
from tests.tiny import tiny_model, tiny_processor
from tests.train.test_native_foundation import save_llava


def saved_llava(folder: Path) -> Path:
    """As a run leaves it."""
    save_llava(folder / "llava")
    model = build_omni_model(foundation=str(folder / "llava"))
    renderer = ot.TemplateRenderer(AutoProcessor.from_pretrained(folder / "llava"), model.native_inputs)
    model.save_pretrained(folder / "saved")
    ot.OmniProcessor(renderer, *model.media_adapters()).save_pretrained(folder / "saved")
    return folder / "saved"


@torch.no_grad()
def test_a_whole_model_has_the_same_logits_and_processor_there(tmp_path: Path) -> None:
    saved = saved_llava(tmp_path)
    assert export(saved, tmp_path / "plain") == []
    ours, _ = load_checkpoint(saved)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain")
    ids = torch.arange(5, 30)[None]
    assert torch.equal(plain.eval()(input_ids=ids).logits, ours.foundation.eval()(input_ids=ids).logits)
    one, other = (AutoProcessor.from_pretrained(tmp_path / name) for name in ("plain", "llava"))
    said = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert one.apply_chat_template(said, tokenize=True) == other.apply_chat_template(said, tokenize=True)


def test_attached_parts_are_left_out_and_named_and_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "saved")
    tiny_processor(model).save_pretrained(tmp_path / "saved")
    left_out = export(tmp_path / "saved", tmp_path / "plain", "bfloat16")
    assert left_out == sorted([*model.encoders, *model.decoders])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "plain")) == len(tiny_processor(model).tokenizer)


def test_what_a_model_keeps_in_fp32_stays_so(tmp_path: Path) -> None:
    model = build_omni_model(foundation=deepseek_v3())
    biases = {name: value for name, value in model.foundation.state_dict().items() if "e_score_correction_bias" in name}
    for bias in biases.values():
        bias.copy_(torch.linspace(0.5, 0.507, len(bias)))
    model.save_pretrained(tmp_path / "saved")
    tiny_processor(tiny_model()).save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "plain", "bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert biases and all(torch.equal(plain[name], bias) for name, bias in biases.items())
    assert plain["lm_head.weight"].dtype == torch.bfloat16


@torch.no_grad()
def test_adapters_are_merged_into_the_weights(tmp_path: Path) -> None:
    adapted = qwen3_moe_with_adapters()
    adapted.save_pretrained(tmp_path / "adapted")
    tiny_processor(tiny_model()).save_pretrained(tmp_path / "adapted")
    export(tmp_path / "adapted", tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.arange(5, 30)[None]
    expected = adapted.foundation.eval()(input_ids=ids).logits
    torch.testing.assert_close(plain.eval()(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_unknown_dtypes_and_full_folders_are_refused(tmp_path: Path) -> None:
    saved = saved_llava(tmp_path)
    with pytest.raises(UserError, match="already has files; use a new folder"):
        export(saved, tmp_path)
    for dtype in ("int8", "float8_e4m3fn"):
        with pytest.raises(UserError, match=f"dtype: found '{dtype}'; expected one of float32, bfloat16, float16"):
            export(saved, tmp_path / "plain", dtype)
    assert not (tmp_path / "plain").exists()
