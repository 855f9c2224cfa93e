"""Widths of the models that the phases train, and how many of their layers fit in the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig

from gpu.measured import Load

# Bytes of a parameter: weight, gradient and two moments in fp32, and a bf16 copy while it is used.
_PARAMETER_BYTES = 4 * 4 + 2
# What HF keeps of a token for the backward under autocast, in bytes per unit of width. A layer: of two norms input,
# normalised rows and result in fp32 and bf16; of the heads before and after norm and rotation; for sdpa with a mask,
# keys and values once per head and the mask's row, in bf16; of the MLP gate, up, silu and product. A block of the
# tower: the same in bf16. Of logits: one in bf16, three in fp32.
_HIDDEN_BYTES, _HEAD_BYTES, _SDPA_BYTES, _MLP_BYTES, _LOGIT_BYTES = 32, 12, 2, 10, 14
_TOWER_HIDDEN_BYTES, _TOWER_MLP_BYTES = 28, 4
# Of a token's row for each of its experts, all in fp32, since autocast leaves grouped products alone: the row, its
# result before and after the weight and in order of the tokens; gate and up, silu and product.
_ROW_HIDDEN_BYTES, _ROW_INNER_BYTES = 16, 16
_PATCHES = 2  # per token of a pack: half of the tokens are of images, with four patches each
_USED = 0.9  # of the free memory; the rest is for fragmentation


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and samples.

    Attributes:
        text: config of the language model.
        vision: of the tower.
        special: ids of image, video, start and end of an image.
        mrope: sections of the rotary positions.
        longest: tokens of a sample's text.
        sides: least and largest side of an image, in units of 32 pixels.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    special: tuple[int, int, int, int]
    mrope: list[int]
    longest: int
    sides: tuple[int, int]


FULL = Sizes(
    text={
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
    },
    vision={
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    special=(151655, 151656, 151652, 151653),
    mrope=[24, 20, 20],
    longest=4096,
    sides=(8, 28),
)
TINY = Sizes(
    text=FULL.text
    | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    vision=FULL.vision
    | {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    special=(500, 501, 502, 503),
    mrope=[4, 2, 2],
    longest=64,
    sides=(1, 3),
)


MOE = replace(
    FULL,
    text=FULL.text
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 4},
)
TINY_MOE = replace(TINY, text=TINY.text | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2})


def sizes_of(kind: str, tiny: bool) -> Sizes:
    """Return the widths of Qwen3-4B, Qwen3-VL-4B (``mixed``) or Qwen3-30B-A3B (``experts``), or tiny ones."""
    if kind == "experts":
        return TINY_MOE if tiny else MOE
    return TINY if tiny else FULL


def config_of(kind: str, sizes: Sizes, layers: int) -> Any:
    """HF's config: Qwen3 for ``text``, Qwen3-VL for ``mixed``, Qwen3-MoE for ``experts``."""
    text = sizes.text | {"num_hidden_layers": layers}
    if kind != "mixed":
        name = "qwen3" if kind == "text" else "qwen3_moe"
        return AutoConfig.for_model(name, **text, tie_word_embeddings=kind == "text")
    image, video, opening, closing = sizes.special
    rope = {"rope_type": "default", "mrope_section": sizes.mrope, "mrope_interleaved": True, "rope_theta": 5e6}
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    return AutoConfig.for_model(
        "qwen3_vl",
        tie_word_embeddings=True,
        text_config=text | {"rope_parameters": rope},
        vision_config=sizes.vision | vision | {"out_hidden_size": text["hidden_size"]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=opening,
        vision_end_token_id=closing,
    )


def layers_that_fit(kind: str, sizes: Sizes, load: Load, most: int) -> int:
    """Layers of the language model for which the free memory is enough, at most ``most``."""
    text, vision, tokens = sizes.text, sizes.vision, load.tokens
    most = min(most, text["num_hidden_layers"])
    if load.device.type != "cuda":
        return most
    layer, vocabulary_matrices = _layer_bytes(text, tokens), 2 if kind == "experts" else 1
    in_vocabulary = vocabulary_matrices * text["hidden_size"] * _PARAMETER_BYTES
    taken = text["vocab_size"] * (in_vocabulary + tokens * _LOGIT_BYTES)
    if kind == "mixed":
        hidden, inner = vision["hidden_size"], vision["intermediate_size"]
        block = hidden * (4 * hidden + 2 * inner) * _PARAMETER_BYTES
        block += _PATCHES * tokens * (hidden * _TOWER_HIDDEN_BYTES + inner * _TOWER_MLP_BYTES)
        taken += vision["depth"] * block
    free, _ = torch.cuda.mem_get_info(load.device)
    return max(1, min(most, int((free * _USED - taken) / layer)))


def _layer_bytes(text: dict[str, Any], tokens: int) -> int:
    """Of the language model."""
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    queries, keys = (text[f"num_{which}_heads"] * text["head_dim"] for which in ("attention", "key_value"))
    per_token = hidden * _HIDDEN_BYTES + (queries + 2 * keys) * _HEAD_BYTES + (2 * queries + tokens) * _SDPA_BYTES
    if "num_experts" in text:
        of_one = text["moe_intermediate_size"]
        per_token += text["num_experts_per_tok"] * (hidden * _ROW_HIDDEN_BYTES + of_one * _ROW_INNER_BYTES)
        inner = text["num_experts"] * of_one
    else:
        per_token += inner * _MLP_BYTES
    return hidden * (2 * queries + 2 * keys + 3 * inner) * _PARAMETER_BYTES + tokens * per_token
