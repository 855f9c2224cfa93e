"""A config from which a model was made can be used again: nothing that was chosen for that model is written into it."""

from __future__ import annotations

import torch
from transformers import Qwen3ForCausalLM

from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.attention.install import ATTENTION_NAME, use_omnitrain_attention
from omnitrain.ops.experts.install import use_omnitrain_experts
from tests.parallel import factories


def test_a_models_choices_are_not_written_into_the_users_config() -> None:
    ready = factories.qwen3_vl_moe()
    config, before = ready.config, ready.config.to_dict()
    model = build_omni_model(foundation=ready)
    use_omnitrain_attention(model.foundation)
    use_omnitrain_experts(model)
    assert model.foundation.config._attn_implementation == ATTENTION_NAME
    assert config._attn_implementation == config.text_config._attn_implementation == "sdpa"
    assert config.to_dict() == before


def test_parts_of_a_model_share_the_configs_that_they_shared() -> None:
    foundation = build_omni_model(foundation=factories.qwen3_vl_moe()).foundation
    text = foundation.model.language_model
    assert text.config is foundation.config.text_config
    assert text.layers[0].self_attn.config is text.config


@torch.no_grad()
def test_a_model_made_from_the_config_of_a_prepared_one_computes_the_same() -> None:
    foundation = build_omni_model(foundation=factories.qwen3()).foundation.eval()
    ids = torch.arange(5, 20)[None]
    expected = foundation(input_ids=ids).logits
    use_omnitrain_attention(foundation)
    other = Qwen3ForCausalLM(foundation.config).eval()
    other.load_state_dict(foundation.state_dict())
    assert torch.equal(other(input_ids=ids).logits, expected)
