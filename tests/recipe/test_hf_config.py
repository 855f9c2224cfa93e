from typing import Any

import pytest
from pydantic import ValidationError
from transformers import CONFIG_MAPPING

from omnitrain.recipe.hf_config import check_hf_config_keys


def problems(value: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ValidationError) as error:
        check_hf_config_keys(value)
    return {".".join(map(str, detail["loc"])): detail["msg"] for detail in error.value.errors()}


def test_sub_configs_are_checked_by_the_class_that_hf_would_make_of_them() -> None:
    found = problems(
        {
            "model_type": "llava",
            "text_config": {"vocab_sise": 3},
            "vision_config": {"model_type": "siglip_vision_model", "patch_sise": 4},
        }
    )
    assert found == {
        "text_config.vocab_sise": "unknown key of LlamaConfig, found 3; did you mean `vocab_size`?",
        "vision_config.patch_sise": "unknown key of SiglipVisionConfig, found 4; did you mean `patch_size`?",
    }


def test_a_key_that_only_the_model_asks_for_is_known_where_the_model_derives_it() -> None:
    check_hf_config_keys({"model_type": "qwen3_moe", "head_dim": 128})
    assert set(problems({"model_type": "qwen2_5_vl_vision", "head_dim": 128})) == {"head_dim"}


def test_model_type_is_needed_and_known() -> None:
    assert "missing" in problems({"hidden_size": 3})["model_type"]
    assert "did you mean `siglip_vision_model`?" in problems({"model_type": "siglip_vision_modle"})["model_type"]


def test_all_values_of_a_wrong_type_are_named() -> None:
    found = problems({"model_type": "qwen3", "hidden_size": "wide", "vocab_size": [1], "num_hidden_layers": 2})
    assert sorted(found) == ["hidden_size", "vocab_size"]
    assert found["hidden_size"].startswith("found 'wide'; Field 'hidden_size' expected int, got str")


def test_values_that_do_not_fit_together_are_refused() -> None:
    found = problems({"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]})
    assert "`num_hidden_layers` (3) must be equal to the number of `layer_types` (1)" in found[""]


def test_rotary_parameters_are_checked_per_layer_type_too() -> None:
    per_type = {"full_atention": {"rope_theta": 1e4}, "sliding_attention": {"rope_thet": 1e4}}
    assert set(problems({"model_type": "qwen3", "rope_parameters": per_type})) == {
        "rope_parameters.full_atention",
        "rope_parameters.sliding_attention.rope_thet",
    }


def test_older_spellings_and_aliases_are_accepted_where_hf_converts_them() -> None:
    check_hf_config_keys({"model_type": "qwen3", "rope_theta": 1e4, "torch_dtype": "float32"})
    check_hf_config_keys({"model_type": "whisper", "hidden_size": 64, "encoder_layers": 2})
    assert "rope_theta" in problems({"model_type": "siglip_vision_model", "rope_theta": 1e4})


@pytest.mark.parametrize(
    "model_type",
    ["qwen3", "qwen3_vl", "qwen3_omni_moe_thinker", "siglip_vision_model", "clip_vision_model", "whisper", "encodec",
     "dac", "mimi", "janus_vqgan", "emu3_vqgan", "chameleon_vqgan"],
)  # fmt: skip
def test_what_a_class_saves_passes_its_own_check(model_type: str) -> None:
    saved = CONFIG_MAPPING[model_type]().to_diff_dict() | {"model_type": model_type}
    check_hf_config_keys({key: value for key, value in saved.items() if not key.startswith("_")})


def test_sizes_must_be_positive() -> None:
    found = problems({"model_type": "llava", "text_config": {"vocab_size": 0}, "vision_config": {"patch_size": -2}})
    assert found == {
        "text_config.vocab_size": "found 0; expected a number greater than 0; change it",
        "vision_config.patch_size": "found -2; expected a number greater than 0; change it",
    }
