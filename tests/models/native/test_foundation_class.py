import pytest
from transformers import AutoConfig

from omnitrain.errors import UserError
from omnitrain.models.build import build_foundation_model
from omnitrain.models.hf import as_dict, foundation_class
from tests.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_one_class_with_a_forward_and_a_head(family: str) -> None:
    config = FAMILIES[family]()
    found = foundation_class(config)
    assert found.config_class is type(config) and found.can_generate() and "forward" in vars(found)


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
