import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from omnitrain.errors import UserError
from omnitrain.models.build import build_foundation_model
from omnitrain.models.hf import as_dict, foundation_class, require_sub_configs, resolve
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


def test_a_whole_omni_config_names_the_part_to_give() -> None:
    whole = AutoConfig.for_model("qwen3_omni_moe", thinker_config=as_dict(FAMILIES["qwen3_omni_moe_thinker"]()))
    with pytest.raises(UserError, match=r"one of its parts .*thinker_config \(Qwen3OmniMoeThinkerForConditionalGen"):
        foundation_class(whole)


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
        with pytest.raises(UserError, match=r"lacks (text|vision)_config; write every part"):
            build_foundation_model(str(tmp_path), init_device="meta")
