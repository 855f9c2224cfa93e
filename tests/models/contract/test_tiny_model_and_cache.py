from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, Qwen3ForCausalLM

from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract import cache
from omnitrain.models.contract.cache import contract_path, keep, kept
from omnitrain.models.contract.check import contract_of
from omnitrain.models.contract.tiny_model import build_tiny_model, tiny_config
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES
from tests.models.contract import broken


def real_size() -> PreTrainedConfig:
    """Sizes of a Qwen3-VL with 235 billion parameters."""
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6, "mrope_interleaved": True}
    return AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
    )


def num_parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in foundation_class(config)(config).parameters())


def test_a_tiny_model_keeps_hidden_widths_and_loses_depth_experts_vocabulary_and_what_is_inside_mlps() -> None:
    full = real_size()
    small = tiny_config(full)
    text = small.text_config
    assert num_parameters(full) > 200e9 and num_parameters(small) < 0.6e9
    assert (text.num_hidden_layers, text.num_experts, text.num_experts_per_tok, text.vocab_size) == (4, 4, 2, 512)
    for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"):
        assert getattr(text, name) == getattr(full.text_config, name)
    assert (text.moe_intermediate_size, text.intermediate_size) == (256, 256)
    # three levels of side features, and a layer without
    shallow = {"depth": 4, "deepstack_visual_indexes": [0, 1, 2], "intermediate_size": 256}
    assert small.vision_config.to_dict() == full.vision_config.to_dict() | shallow
    assert tiny_config(full, cut_towers=False).vision_config.to_dict() == full.vision_config.to_dict()
    tokens = {small.image_token_id, small.video_token_id, small.vision_start_token_id, small.vision_end_token_id}
    assert len(tokens) == 4 and max(tokens) < 512
    assert full.text_config.vocab_size == 151936


def test_a_tiny_model_has_a_layer_of_each_kind_and_windows_of_a_few_tokens() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=24, layer_types=kinds * 4, sliding_window=1024)
    small = tiny_config(config)
    assert small.layer_types == kinds and small.num_hidden_layers == 6
    assert small.sliding_window == 8


def test_a_tiny_model_keeps_layers_that_take_keys_from_others_and_the_values_of_each_layer() -> None:
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=35, layer_types=kinds * 7, num_kv_shared_layers=20, hidden_size=64
    )
    small = tiny_config(config)
    assert (small.num_hidden_layers, small.num_kv_shared_layers) == (10, 5)
    assert small.layer_types == kinds * 2
    assert small.kv_sharing_modes == [None] * 3 + ["store"] * 2 + ["reuse"] * 5
    assert [layer.head_dim for layer in small.per_layer_config] == [256, 256, 256, 256, 512] * 2
    assert num_parameters(small) < num_parameters(config) / 3
    assert config.num_hidden_layers == 35 and config.per_layer_config[34].head_dim == 512


def test_a_tiny_model_is_the_same_each_time_and_leaves_random_numbers_alone() -> None:
    config = tiny_config(FAMILIES["qwen3"]())
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, other = (build_tiny_model(Qwen3ForCausalLM, config).state_dict() for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_contract_is_written_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = FAMILIES["qwen3"]()
    model = Qwen3ForCausalLM(config)
    contract = contract_of(model)
    path = contract_path(Qwen3ForCausalLM, config)
    assert kept(path, Contract) == contract and contract.findings
    keep(path, Contract(head="plain"))
    assert contract_of(model) == Contract(head="plain")
    path.write_text("{")
    assert contract_of(model) == contract


def test_another_config_or_class_has_another_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = FAMILIES["qwen3"]()
    other = copy.deepcopy(config)
    other.sliding_window = 17
    paths = [contract_path(c, v) for c, v in ((Qwen3ForCausalLM, config), (broken.Capped, config))]
    assert len({*paths, contract_path(Qwen3ForCausalLM, other)}) == 3
    assert contract_path(Qwen3ForCausalLM, FAMILIES["qwen3"]()) == paths[0]


def test_a_refusal_is_raised_each_time_and_never_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = broken.Refusing(FAMILIES["qwen3"]())
    for _ in range(2):
        with pytest.raises(
            UserError, match="omnitrain cannot train Refusing with this config: modalities: text: ValueError"
        ):
            contract_of(model)
    assert list(tmp_path.rglob("*.json")) == []


def test_a_plugin_edited_or_a_package_installed_is_checked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "edited_plugin.py"
    plugin.write_text("from transformers import Qwen3ForCausalLM\n\n\nclass Own(Qwen3ForCausalLM): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("edited_plugin").Own
    config = FAMILIES["qwen3"]()
    before = contract_path(own, config)
    assert contract_path(own, config) == before
    plugin.write_text(plugin.read_text() + "    # edited\n")
    assert contract_path(own, config) != before
    edited = contract_path(own, config)
    monkeypatch.setattr("omnitrain.models.contract.cache._installed", lambda: ("some-kernels==1.0",))
    assert contract_path(own, config) != edited


def test_a_cache_that_is_damaged_or_no_folder_costs_a_check_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file" / "contract.json"
    path.parent.write_text("")
    keep(path, Contract())
    (tmp_path / "list.json").write_text("[]")
    assert kept(path, Contract) is kept(tmp_path / "list.json", Contract) is None


def test_what_other_code_of_omnitrain_found_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a contract nor of what lies beside it (sequences, towers), whose paths are made from its own."""
    config = FAMILIES["qwen3"]()
    before = contract_path(Qwen3ForCausalLM, config)
    monkeypatch.setattr(cache, "_code_digest", lambda: "other")
    assert contract_path(Qwen3ForCausalLM, config) != before
