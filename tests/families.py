"""Tiny configs of HuggingFace model families: text models and multimodal ones, widths of at most 64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 200
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_GRID_VIT: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_DEEPSTACK_VIT = _GRID_VIT | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
WINDOW_VIT = _GRID_VIT | {"window_size": 16, "fullatt_block_indexes": [1]}
_SIGLIP = _VIT | {"model_type": "siglip_vision_model", "vision_use_head": False}
CODES = 16
VQ = {"embed_dim": 4, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 32}
_LAYERS_APART = {
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 32,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
}
_VISION_TOKENS = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}
_OMNI_TOKENS = {"image_token_id": 190, "video_token_id": 191, "audio_token_id": 195} | {
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
    "audio_start_token_id": 196,
    "audio_end_token_id": 197,
}
_AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "n_window": 10,
    "output_dim": 64,
    "max_source_positions": 100,
}


def _text(model_type: str, **values: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(model_type, **(_TEXT | values))


def _vision(
    model_type: str, text: dict[str, Any], vision: dict[str, Any] | None, **values: Any
) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(model_type, text_config=_TEXT | text, vision_config=vision, **values)


def _qwen2_5_omni_thinker() -> PreTrainedConfig:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    return AutoConfig.for_model(
        "qwen2_5_omni_thinker",
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config=WINDOW_VIT,
        audio_config=_AUDIO,
        position_id_per_seconds=25,
        **_OMNI_TOKENS,
    )


def _qwen3_omni_moe_thinker() -> PreTrainedConfig:
    return AutoConfig.for_model(
        "qwen3_omni_moe_thinker",
        text_config=_TEXT | _HEAD | _EXPERTS | _MROPE,
        vision_config=_DEEPSTACK_VIT,
        audio_config=_AUDIO | {"downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 100},
        position_id_per_seconds=25,
        **_OMNI_TOKENS,
    )


def chameleon(text: Mapping[str, Any] = _TEXT, image: int = 190, first: int = 150) -> PreTrainedConfig:
    """Images whose codes are words of the vocabulary, from ``first`` on; ``image``: their placeholder."""
    names = ("".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) for code in range(CODES))
    words = {"<image>": image} | {f"IMGIMG{name}Z": first + code for code, name in enumerate(names)}
    vq = VQ | {"num_embeddings": CODES, "resolution": 8}
    return AutoConfig.for_model("chameleon", **text, vocabulary_map=words, vq_config=vq)


def emu3(text: Mapping[str, Any] = _TEXT, image: int = 190, first: int = 150) -> PreTrainedConfig:
    """The same, with the word 3 at the end of each row of codes."""
    words = {"<image>": image, "<|extra_200|>": 3}
    words |= {f"<|visual token {code:06d}|>": first + code for code in range(CODES)}
    vq = VQ | {"codebook_size": CODES, "attn_resolutions": [], "hidden_size": 32, "num_attention_heads": 1}
    vq |= {"latent_channels": 4, "channel_multiplier": [1, 1, 1, 1]}
    text_config = dict(text) | {"attention_dropout": 0.0}
    return AutoConfig.for_model("emu3", text_config=text_config, vocabulary_map=words, vq_config=vq)


def granite_speech() -> PreTrainedConfig:
    """Sound; a tower with batch norms."""
    return AutoConfig.for_model(
        "granite_speech",
        text_config=_TEXT | {"model_type": "granite"},
        encoder_config={
            "input_dim": 16,
            "hidden_dim": 32,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 20,
            "num_layers": 2,
            "context_size": 8,
            "max_pos_emb": 16,
            "conv_kernel_size": 3,
            "dropout": 0.0,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 32,
            "encoder_hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "cross_attention_frequency": 1,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        audio_token_index=190,
        window_size=4,
        downsample_rate=2,
        has_lora_adapter=False,
    )


TEXT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": _text("qwen3", **_HEAD),
    "qwen3_moe": _text("qwen3_moe", **_HEAD, **_EXPERTS),
    "deepseek_v3": _text(
        "deepseek_v3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "glm4_moe": _text(
        "glm4_moe",
        **_HEAD,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gpt_oss": _text(
        "gpt_oss",
        **_HEAD,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_next": _text("qwen3_next", **_HEAD, **_EXPERTS, **_LINEAR, shared_expert_intermediate_size=32),
    "gemma4_moe": _vision(
        "gemma4",
        _HEAD
        | _LAYERS_APART
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        None,
        audio_config=None,
        image_token_id=190,
    ),
}

VISION_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2_5_vl": _vision(
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        WINDOW_VIT | {"tokens_per_second": 2},
        **_VISION_TOKENS,
    ),
    "qwen3_vl": _vision("qwen3_vl", _HEAD | _MROPE, _DEEPSTACK_VIT, **_VISION_TOKENS),
    "qwen3_vl_moe": _vision("qwen3_vl_moe", _HEAD | _MROPE | _EXPERTS, _DEEPSTACK_VIT, **_VISION_TOKENS),
    "ernie4_5_vl_moe": _vision(
        "ernie4_5_vl_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [32, 16],
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e4},
        },
        _VIT | {"spatial_merge_size": 2, "num_heads": 2},
        image_start_token_id=192,
        image_end_token_id=193,
        image_token_id=190,
        video_start_token_id=194,
        video_end_token_id=195,
        video_token_id=191,
    ),
    "qwen3_5": _vision(
        "qwen3_5", _HEAD | _MROPE | _LINEAR, _GRID_VIT | {"num_position_embeddings": 64}, **_VISION_TOKENS
    ),
    "glm4v": _vision(
        "glm4v",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        _GRID_VIT | {"image_size": 16},
        video_start_token_id=194,
        video_end_token_id=195,
        **_VISION_TOKENS,
    ),
    "internvl": _vision(
        "internvl",
        {"model_type": "qwen2"},
        _VIT | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=190,
        image_seq_length=4,
    ),
    "llava": _vision(
        "llava",
        {"model_type": "llama"},
        _VIT | {"model_type": "clip_vision_model"},
        image_token_index=190,
        image_seq_length=16,
    ),
    "llava_next": _vision(
        "llava_next",
        {"model_type": "llama"},
        _VIT | {"model_type": "clip_vision_model"},
        image_token_index=190,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "gemma3": _vision(
        "gemma3",
        _HEAD | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        _SIGLIP,
        image_token_index=190,
        mm_tokens_per_image=4,
    ),
    "paligemma": _vision(
        "paligemma",
        _HEAD | {"model_type": "gemma"},
        _SIGLIP | {"projection_dim": 64},
        image_token_index=190,
        projection_dim=64,
    ),
    "mistral3": _vision(
        "mistral3",
        _HEAD | {"model_type": "mistral"},
        _VIT | {"model_type": "pixtral", "head_dim": 16},
        image_token_index=190,
        spatial_merge_size=2,
    ),
    "aya_vision": _vision(
        "aya_vision",
        {"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        _SIGLIP,
        image_token_index=190,
        downsample_factor=2,
        alignment_intermediate_size=64,
    ),
    "idefics3": _vision("idefics3", {"model_type": "llama"}, _VIT, image_token_id=190, scale_factor=2, pad_token_id=0),
    "smolvlm": _vision("smolvlm", {"model_type": "llama"}, _VIT, image_token_id=190, scale_factor=2, pad_token_id=0),
    "janus": _vision(
        "janus",
        {"model_type": "llama"},
        _VIT | {"num_image_tokens": 16, "projection_dim": 64, "depth": 2},
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 16,
            "double_latent": False,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "projection_dim": 64,
            "num_patches": 4,
            "image_token_embed_dim": 64,
        },
        image_token_id=190,
    ),
    "llama4": _vision(
        "llama4",
        _HEAD | {"num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 8},
        _VIT
        | {"intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        image_token_index=190,
    ),
    "llava_onevision": _vision(
        "llava_onevision",
        {"model_type": "qwen2"},
        _SIGLIP,
        image_token_index=190,
        video_token_index=191,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "gemma4": _vision(
        "gemma4",
        _HEAD
        | _LAYERS_APART
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
        },
        _VIT | {"head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 64},
        audio_config=None,
        image_token_id=190,
        video_token_id=191,
    ),
}

AUDIO_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2_5_omni_thinker": _qwen2_5_omni_thinker,
    "qwen3_omni_moe_thinker": _qwen3_omni_moe_thinker,
}

FAMILIES = TEXT_FAMILIES | VISION_FAMILIES | AUDIO_FAMILIES
"""Name -> function that returns a tiny config."""
UNSHRINKABLE = {"granite_speech": granite_speech, "chameleon": chameleon, "emu3": emu3}
"""The same for families whose small variants, as ``tests/models/shrunk.py`` makes them, cannot read their media."""
