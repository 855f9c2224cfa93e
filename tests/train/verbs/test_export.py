"""What omnitrain exports, plain transformers reads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import omnitrain as ot
from omnitrain.checkpoint.safetensors_file import SafetensorsFile
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.generate import generate
from omnitrain.models.omni.transformers_class import as_transformers_class
from omnitrain.train.build_from_recipe import load_checkpoint
from omnitrain.train.verbs.export import export
from tests.parallel.factories import deepseek_v3, qwen3_moe_with_adapters
from tests.tiny import FOUNDATION, SIGLIP, tiny_model, tiny_processor, tiny_row
from tests.train.test_native_foundation import save_llava


def saved_llava(folder: Path) -> Path:
    """As a run leaves it."""
    save_llava(folder / "llava")
    model = build_omni_model(foundation=str(folder / "llava"))
    renderer = ot.data.TemplateRenderer(AutoProcessor.from_pretrained(folder / "llava"), model.native_inputs)
    model.save_pretrained(folder / "saved")
    ot.OmniProcessor(renderer, *model.media_adapters()).save_pretrained(folder / "saved")
    return folder / "saved"


@torch.no_grad()
def test_a_whole_model_has_the_same_logits_and_processor_there(tmp_path: Path) -> None:
    saved = saved_llava(tmp_path)
    assert export(saved, tmp_path / "plain") == f"exported to {tmp_path / 'plain'} as LlavaForConditionalGeneration"
    ours, _ = load_checkpoint(saved)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain")
    ids = torch.arange(5, 30)[None]
    assert torch.equal(plain.eval()(input_ids=ids).logits, ours.foundation.eval()(input_ids=ids).logits)
    source, files = tmp_path / "llava", tmp_path / "plain"
    assert {file.name for file in files.iterdir()} == {file.name for file in source.iterdir()}
    changed = {file.name for file in source.iterdir() if file.read_bytes() != (files / file.name).read_bytes()}
    assert changed == {"config.json", "generation_config.json"}  # the template ends answers with another token
    end = AutoProcessor.from_pretrained(files).tokenizer.eos_token_id
    for name in changed:
        before, after = (json.loads((folder / name).read_text()) for folder in (source, files))
        inside = [config.get("text_config", config) for config in (before, after)]
        assert [inside[1].pop("eos_token_id"), inside[0].pop("eos_token_id")] == [[end, 2], 2] and before == after


@pytest.mark.second
def test_a_model_without_a_class_is_an_omni_folder_and_its_foundation_alone_has_the_dtype_asked_for(
    tmp_path: Path,
) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "saved")
    tiny_processor(model).save_pretrained(tmp_path / "saved")
    said = export(tmp_path / "saved", tmp_path / "omni")
    names = "audio_decoder, audio_encoder, image_decoder, image_encoder"
    assert said == (
        f"exported to {tmp_path / 'omni'} as an omni folder, which only omnitrain reads: no class of transformers has "
        f"these components: {names} (--foundation-only writes the Qwen3ForCausalLM alone)"
    )
    again, _ = load_checkpoint(tmp_path / "omni", checked=False)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert again.foundation.config.eos_token_id == tiny_processor(model).end_token
    said = export(tmp_path / "saved", tmp_path / "plain", "bfloat16", foundation_only=True)
    assert said == f"exported to {tmp_path / 'plain'} as Qwen3ForCausalLM"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "plain")) == len(tiny_processor(model).tokenizer)


CLIP = SIGLIP | {"model_type": "clip_vision_model"}
del CLIP["vision_use_head"]


@pytest.mark.parametrize(
    ("kind", "tower", "class_name"),
    [
        ("linear", CLIP, "LlavaForConditionalGeneration"),
        ("mlp", CLIP, "VipLlavaForConditionalGeneration"),
    ],
)
@torch.no_grad()
def test_a_tower_a_projector_and_a_language_model_are_a_class_of_transformers_that_answers_alike(
    tmp_path: Path, kind: str, tower: dict[str, Any], class_name: str
) -> None:
    encoders = {"image_encoder": {"tower": {"config": tower}, "projector": {"kind": kind}}}
    model = tiny_model(encoders=encoders, decoders={})
    model.save_pretrained(tmp_path / "saved")
    ours = tiny_processor(model)
    ours.save_pretrained(tmp_path / "saved")
    assert f"as {class_name}, which reads images" in export(tmp_path / "saved", tmp_path / "plain")
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain").eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "plain", backend="pil")
    assert type(plain).__name__ == class_name

    row = tiny_row("image_to_text", 3)
    image = Image.open(io.BytesIO(row.media["image"][0])).convert("RGB")
    content = [{"type": "image", "image": image}, row.messages[0]["content"][1]]
    question = [{"role": "user", "content": content}]
    inputs = processor.apply_chat_template(
        question, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    prompt = ours.prompt(row)
    assert isinstance(prompt, Sample)
    words = inputs["input_ids"][0] != plain.config.image_token_id
    span = prompt.spans[0]
    assert inputs["input_ids"][0][words].tolist() == np.delete(prompt.input_ids, span.positions).tolist()

    answer = generate(model, ours, [prompt], max_new_tokens=12)[0]
    theirs = plain.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].size(1) :]
    assert theirs.tolist() == [token for _, token in answer.tokens]
    embeds = model.foundation.get_input_embeddings()(torch.tensor(prompt.input_ids))[None]
    pixels = {name: torch.from_numpy(value) for name, value in span.item.features.items()}
    embeds[0, span.positions] = model.encoders["image_encoder"].lm_encode(pixels, (span.item.num_tokens,))
    expected = model.foundation(inputs_embeds=embeds).logits
    logits = plain(**inputs).logits[..., : expected.size(-1)]
    assert (logits - expected).abs().max() < 1e-6 * expected.abs().max()
    assert plain.generation_config.eos_token_id == ours.end_token == processor.tokenizer.eos_token_id
    assert plain.generation_config.suppress_tokens == [plain.config.image_token_id]


@pytest.mark.parametrize(
    ("tower", "foundation"),
    [(SIGLIP, {}), (CLIP, {"model_type": "cohere", "logit_scale": 0.3})],
    ids=["norm after the tower", "scaled logits"],
)
def test_a_class_that_would_give_other_logits_is_not_taken(tower: dict[str, Any], foundation: dict[str, Any]) -> None:
    encoders = {"image_encoder": {"tower": {"config": tower}, "projector": {"kind": "linear"}}}
    text = {key: value for key, value in FOUNDATION.items() if key != "head_dim"} | foundation
    with pytest.raises(UserError, match=r"the logits of \w+ with these weights differ by [\d.e+-]+ of the largest"):
        as_transformers_class(tiny_model(encoders=encoders, decoders={}, foundation=text))


def test_the_chat_template_writes_what_the_model_was_trained_on(tmp_path: Path) -> None:
    model = tiny_model(encoders={}, decoders={})
    model.save_pretrained(tmp_path / "saved")
    ours = tiny_processor(model)
    ours.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    row = tiny_row("text", 3)
    sample, prompt = ours.sample(row), ours.prompt(row)
    assert isinstance(sample, Sample) and isinstance(prompt, Sample)
    assert tokenizer.apply_chat_template(row.messages)["input_ids"] == sample.input_ids.tolist()
    asked = tokenizer.apply_chat_template(row.messages[:1], add_generation_prompt=True)["input_ids"]
    assert asked == prompt.input_ids.tolist()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "plain").generation_config.eos_token_id == ours.end_token


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


@pytest.mark.parametrize("foundation_only", [False, True])
def test_a_full_disk_is_told_with_the_space_that_is_left(
    foundation_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = tiny_model()
    model.save_pretrained(tmp_path / "saved")
    tiny_processor(model).save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(SafetensorsFile, "write", write)
    told = r"the export to .*plain is not complete: \[Errno 28\] No space left on device; [\d.,]+ [MG]iB are free there"
    with pytest.raises(TrainingError, match=told):
        export(tmp_path / "saved", tmp_path / "plain", foundation_only=foundation_only)
