"""Unmodified models of transformers: packed samples equal each sample alone, unpacked input equals plain transformers.

Weights are redrawn so that attention is peaked: masks and offsets that are wrong would show.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from omnitrain.errors import UserError
from omnitrain.ops.attention.entry import CHOSEN
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.attention.packed_context import packed

LENGTHS = (7, 10, 13, 1)
OFFSETS = (0, *itertools.accumulate(LENGTHS))
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
CHUNKS = {"attention_chunk_size": 4, "no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 48}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}

TEXT_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT)),
    "gemma2: soft cap, window": lambda: Gemma2ForCausalLM(Gemma2Config(**TEXT, **WINDOWS)),
    "gemma3: window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TEXT, **WINDOWS)),
    "gpt_oss: sinks, window": lambda: GptOssForCausalLM(GptOssConfig(**TEXT, **WINDOWS, **EXPERTS)),
    "deepseek_v3: value width": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**TEXT, **LATENT})),
    "llama4: chunks": lambda: Llama4ForCausalLM(Llama4TextConfig(**TEXT, **CHUNKS)),
}


# A bias of keys that no rotation follows moves all scores of a query alike: its gradient is rounding.
ZERO_GRADIENT = {"model.vision_tower.encoder.layers.0.self_attn.k_proj.bias"}


def redraw(model: PreTrainedModel) -> PreTrainedModel:
    """Weights of fan-in scale, queries and keys larger, norms around one, everything else large enough to matter."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.5 * noise)
            else:
                gain = 2.5 if "q_" in name or "k_" in name else 1.0
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
    return model.eval()


def draw_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 90, shape, generator=torch.Generator().manual_seed(seed))


def upstream(logits: torch.Tensor) -> torch.Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def step(model: PreTrainedModel, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits ``[1, T, vocabulary]``, and gradients of their product with fixed noise."""
    model.zero_grad()
    logits = forward()
    (logits * upstream(logits)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(one: tuple[torch.Tensor, dict[str, Any]], other: tuple[torch.Tensor, dict[str, Any]]) -> None:
    torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        if name in ZERO_GRADIENT:
            assert gradient.abs().max() < 1e-5
            continue
        error = (gradient - other[1][name]).abs().max()
        assert error <= 1e-5 * gradient.abs().max() + 1e-7, f"{name}: {error:.1e} of {gradient.abs().max():.1e}"


def alone(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    parts = [model(ids[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(OFFSETS)]
    return torch.cat(parts, 1)


def in_one_row(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with packed(OFFSETS):
        return model(ids, position_ids=positions(), use_cache=False).logits


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_packed_row_equals_each_sample_alone_in_plain_transformers(name: str) -> None:
    model, ids = redraw(TEXT_MODELS[name]()), draw_ids(1, OFFSETS[-1])
    expected = step(model, lambda: alone(model, ids))
    use_omnitrain_attention(model)
    assert_same_step(step(model, lambda: in_one_row(model, ids)), expected)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_changing_one_sample_leaves_the_others_bitwise_unchanged(name: str) -> None:
    model, ids = redraw(TEXT_MODELS[name]()), draw_ids(1, OFFSETS[-1])
    use_omnitrain_attention(model)
    with torch.no_grad():
        before = in_one_row(model, ids)
        ids[:, OFFSETS[1] : OFFSETS[2]] += 1
        after = in_one_row(model, ids)
    changed = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(OFFSETS[1], OFFSETS[2]))


@torch.no_grad()
def unpacked(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits of a row, of a left-padded batch, and of a prefill and a decoding step with a cache."""
    row, batch = draw_ids(1, 20), draw_ids(2, 9)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    whole = model(row, use_cache=False).logits
    padded = model(batch, attention_mask=mask[:, :9], use_cache=False).logits
    prefill = model(batch, attention_mask=mask[:, :9], use_cache=True)
    decoded = model(draw_ids(2, 1), attention_mask=mask, past_key_values=prefill.past_key_values)
    return [whole, padded, prefill.logits, decoded.logits]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_unpacked_input_is_bit_for_bit_plain_transformers(name: str) -> None:
    model = redraw(TEXT_MODELS[name]())
    expected = unpacked(model)
    use_omnitrain_attention(model)
    for ours, theirs in zip(unpacked(model), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_feature_that_sdpa_leaves_out_is_computed_by_the_code_of_the_model() -> None:
    """gpt_oss forced onto sdpa would lose its sinks without a word."""
    model = redraw(TEXT_MODELS["gpt_oss: sinks, window"]())
    eager = unpacked(model)
    model.config._attn_implementation_internal = "sdpa"
    lost = unpacked(model)
    use_omnitrain_attention(model)
    for ours, theirs, without in zip(unpacked(model), eager, lost, strict=True):
        assert torch.equal(ours, theirs) and not torch.allclose(ours, without, atol=1e-2)


IMAGE = 95


def gemma3() -> PreTrainedModel:
    config = Gemma3Config(
        text_config={**TEXT, **WINDOWS},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=96,
        eoi_token_index=97,
    )
    return redraw(Gemma3ForConditionalGeneration(config))


def gemma3_samples() -> list[dict[str, torch.Tensor]]:
    """Text; an image that ends a sample; one that begins the next; two images."""
    places = [(7, ()), (10, (6,)), (13, (0,)), (13, (1, 6))]
    samples = []
    for seed, (length, images) in enumerate(places):
        ids = draw_ids(1, length, seed=seed)
        for start in images:
            ids[0, start : start + 4] = IMAGE
        pixels = torch.randn(len(images), 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        samples.append({"input_ids": ids, "pixel_values": pixels, "position_ids": torch.arange(length)[None]})
    return samples


def join(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    row = {
        name: torch.cat([s[name] for s in samples], 0 if name == "pixel_values" else 1)
        for name in ("input_ids", "pixel_values", "position_ids")
    }
    row["token_type_ids"] = (row["input_ids"] == IMAGE).long()
    return {name: value for name, value in row.items() if value.numel()}


def gemma3_row(model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    lengths = [s["input_ids"].size(1) for s in samples]
    with packed((0, *itertools.accumulate(lengths))):
        return model(**join(samples), use_cache=False).logits


def test_image_blocks_of_packed_samples_are_those_of_each_sample_alone() -> None:
    model, samples = gemma3(), gemma3_samples()
    expected = step(
        model, lambda: torch.cat([model(**join([sample]), use_cache=False).logits for sample in samples], 1)
    )
    use_omnitrain_attention(model)
    assert_same_step(step(model, lambda: gemma3_row(model, samples)), expected)


def test_without_their_image_blocks_the_samples_would_differ() -> None:
    """The comparison above can fail: a causal mask in place of the blocks is far outside of its tolerance."""
    model, sample = gemma3(), gemma3_samples()[3]
    use_omnitrain_attention(model)
    row = join([sample])
    with torch.no_grad():
        blocks = model(**row, use_cache=False).logits
        row["token_type_ids"] = torch.zeros_like(row["token_type_ids"])
        causal = model(**row, use_cache=False).logits
    assert (blocks - causal).abs().max() > 0.1


def test_changing_one_sample_with_images_leaves_the_others_bitwise_unchanged() -> None:
    model, samples = gemma3(), gemma3_samples()
    use_omnitrain_attention(model)
    with torch.no_grad():
        before = gemma3_row(model, samples)
        samples[2]["pixel_values"] = samples[2]["pixel_values"] + 1.0
        after = gemma3_row(model, samples)
    changed = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(17, 30))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("name", ["qwen3", "gemma3: window"])
def test_recomputed_layers_get_the_same_mask_after_the_context_is_left(name: str) -> None:
    model, ids = redraw(TEXT_MODELS[name]()), draw_ids(1, OFFSETS[-1])
    use_omnitrain_attention(model)
    model.train()
    plain = step(model, lambda: in_one_row(model, ids))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = step(model, lambda: in_one_row(model, ids))
    assert torch.equal(plain[0], recomputed[0])
    assert all(torch.equal(plain[1][name], recomputed[1][name]) for name in plain[1])


def test_a_tower_hands_over_its_offsets_and_computes_the_same_bit_for_bit() -> None:
    """For other implementations it cuts queries, keys and values itself, one call per image."""
    config = Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4, out_hidden_size=32, window_size=16
    )
    config.fullatt_block_indexes = [1]
    tower, grids = redraw(Qwen2_5_VisionTransformerPretrainedModel(config)), torch.tensor([[1, 4, 6], [1, 8, 4]])
    patches = torch.randn(56, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = tower(patches, grid_thw=grids).last_hidden_state
        use_omnitrain_attention(tower)
        found = tower(patches, grid_thw=grids).last_hidden_state
    assert torch.equal(found, expected)
    assert "Qwen2_5_VLVisionAttention" in {module for module, *_ in CHOSEN}


def test_two_models_keep_their_own_backends() -> None:
    one, other = TEXT_MODELS["qwen3"](), TEXT_MODELS["qwen3"]()
    use_omnitrain_attention(one, "reference")
    use_omnitrain_attention(other, "sdpa")
    ids = draw_ids(1, OFFSETS[-1])
    in_one_row(one, ids)
    in_one_row(other, ids)
    rows = {asked: used.name for (module, asked, *_), used in CHOSEN.items() if module == "Qwen3Attention"}
    assert rows.items() >= {"reference": "reference", "sdpa": "sdpa"}.items()
    names = (model.config._attn_implementation for model in (one, other))
    assert tuple(names) == ("omnitrain_flash_reference", "omnitrain_flash_sdpa")


def test_a_named_backend_that_cannot_honour_the_model_is_refused() -> None:
    model = TEXT_MODELS["gpt_oss: sinks, window"]()
    use_omnitrain_attention(model, "sdpa")
    with pytest.raises(UserError, match="'sdpa' cannot compute GptOssAttention: it does not support sinks"):
        in_one_row(model, draw_ids(1, OFFSETS[-1]))
    with pytest.raises(UserError, match="no attention backend 'fast'"):
        use_omnitrain_attention(model, "fast")


def test_a_model_that_does_not_ask_for_an_attention_is_left_alone_and_named() -> None:
    config = FalconConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = redraw(FalconForCausalLM(config))
    expected = model(draw_ids(1, 9)).logits
    assert use_omnitrain_attention(model) == ("FalconForCausalLM", "FalconModel")
    assert torch.equal(model(draw_ids(1, 9)).logits, expected)


@pytest.mark.second
def test_a_compiled_layer_computes_the_same_without_compiling_per_offsets() -> None:
    model, ids = redraw(TEXT_MODELS["qwen3"]()), draw_ids(1, OFFSETS[-1])
    use_omnitrain_attention(model)
    with torch.no_grad():
        expected = in_one_row(model, ids)
        torch._dynamo.reset()
        compiled = CompileCounter()
        model.model.layers[0].compile(backend=compiled, dynamic=True)
        assert torch.equal(in_one_row(model, ids), expected)
        frames = compiled.frame_count
        for cut in range(2, 12):
            with packed((0, cut, OFFSETS[-1])):
                model(ids, position_ids=positions(), use_cache=False)
    assert compiled.frame_count == frames
