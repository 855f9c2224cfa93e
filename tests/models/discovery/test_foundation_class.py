import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig, Qwen2_5OmniForConditionalGeneration

from omnitrain.errors import UserError
from omnitrain.models.hf.load import as_dict, foundation_class, require_sub_configs, resolve
from omnitrain.models.omni.build import build_foundation_model, build_omni_model
from tests.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_one_class_with_a_forward_and_a_head(family: str) -> None:
    config = FAMILIES[family]()
    found = foundation_class(config)
    assert found.config_class is type(config) and found.can_generate() and "forward" in vars(found)


def test_a_config_without_a_model_of_its_own_is_built_and_loaded_by_the_one_that_transformers_names(
    tmp_path: Path,
) -> None:
    values = {name: value for name, value in FAMILIES["qwen3"]().to_dict().items() if name != "model_type"}
    config = AutoConfig.for_model("iquestcoder", **values)
    model = foundation_class(config)(config)
    assert type(model).__name__ == "LlamaForCausalLM"
    model.save_pretrained(tmp_path)
    loaded = resolve(str(tmp_path), foundation_class)
    assert type(loaded) is type(model) and type(loaded.config) is type(config)


def in_stages() -> PreTrainedConfig:
    """A whole Qwen2.5-Omni, which reads with one part, speaks with another, and makes sound with a third."""
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    speaker = {"enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 16, "enc_lin_neurons": 16}
    vocoder = text | speaker | {"enc_dim": 16, "enc_emb_dim": 16, "emb_dim": 16, "num_embeds": 32, "ff_mult": 1}
    vocoder |= {"enc_se_channels": 16, "enc_res2net_scale": 2, "block_size": 4}
    return AutoConfig.for_model(
        "qwen2_5_omni",
        thinker_config=as_dict(FAMILIES["qwen2_5_omni_thinker"]()),
        talker_config=text
        | {"vocab_size": 64, "embedding_size": 64, "intermediate_size": 32, "num_key_value_heads": 2},
        token2wav_config={"dit_config": vocoder, "bigvgan_config": {"upsample_initial_channel": 64}},
        enable_audio_output=True,
    )


@pytest.mark.second
def test_of_a_model_that_speaks_in_stages_the_part_that_reads_is_trained_and_put_back(tmp_path: Path) -> None:
    """The other parts keep their bits."""
    whole, back = tmp_path / "whole", tmp_path / "back"
    Qwen2_5OmniForConditionalGeneration(in_stages()).save_pretrained(whole)
    torch.save({}, whole / "spk_dict.pt")  # the voices, without which transformers loads no whole one
    model = build_omni_model(foundation=str(whole))
    assert list(model.runner.native.components) == ["foundation", "image_encoder", "audio_encoder"]
    left = Counter(name.partition(".")[0] for name in load_file(whole / "model.safetensors"))
    assert model.config.unused_tensors == {f"{part}.*": left[part] for part in ("talker", "token2wav")}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    put_together = Qwen2_5OmniForConditionalGeneration.from_pretrained(whole)
    put_together.thinker = model.foundation
    put_together.save_pretrained(back)
    before, after = (load_file(folder / "model.safetensors") for folder in (whole, back))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert before.keys() == after.keys() and changed == {name for name in after if name.startswith("thinker.")}


def test_the_part_that_reads_is_found_in_a_config_and_must_be_written_out() -> None:
    thinker = as_dict(FAMILIES["qwen3_omni_moe_thinker"]())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
    built = build_foundation_model(whole, init_device="meta")
    assert type(built).__name__ == "Qwen3OmniMoeThinkerForConditionalGeneration"
    del thinker["audio_config"]
    with pytest.raises(UserError, match="thinker_config in the 'qwen3_omni_moe' config lacks audio_config"):
        build_foundation_model(whole, init_device="meta")


def test_a_config_of_several_parts_names_those_that_can_be_the_foundation() -> None:
    with pytest.raises(UserError, match=r"one of its parts .*thinker_config \(Qwen2_5OmniThinkerForConditionalGen"):
        foundation_class(in_stages())


def test_a_config_is_built_in_python_as_it_stands_in_a_recipe() -> None:
    config = as_dict(FAMILIES["qwen3"]())
    model = build_omni_model(foundation={"config": config}, init_device="meta")
    assert as_dict(model.foundation.config) == as_dict(build_foundation_model(config, init_device="meta").config)


def test_an_unknown_model_type_is_named() -> None:
    with pytest.raises(UserError, match="model_type 'nobody' is unknown"):
        build_foundation_model({"model_type": "nobody"})


def test_a_config_without_its_part_is_an_error_not_a_full_size_default() -> None:
    values = as_dict(FAMILIES["qwen3_vl"]())
    del values["vision_config"]
    with pytest.raises(UserError, match="the 'qwen3_vl' config lacks vision_config"):
        build_foundation_model(values)


@pytest.mark.parametrize("model_type", ["siglip_vision_model", "whisper", "t5"])
def test_a_model_that_is_no_decoder_is_refused(model_type: str) -> None:
    with pytest.raises(UserError, match=f"{model_type!r} is no causal language model"):
        foundation_class(AutoConfig.for_model(model_type))


def test_a_config_file_without_a_part_is_refused_unless_the_language_model_is_written_flat(tmp_path: Path) -> None:
    values = FAMILIES["qwen2_5_vl"]().to_dict()
    text = values.pop("text_config")
    flat = values | {name: value for name, value in text.items() if name != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    require_sub_configs(str(tmp_path))
    for lacking in (values, {name: value for name, value in flat.items() if name != "vision_config"}):
        (tmp_path / "config.json").write_text(json.dumps(lacking))
        with pytest.raises(UserError, match=r"lacks (text|vision)_config; write the config of every part"):
            build_foundation_model(str(tmp_path), init_device="meta")
